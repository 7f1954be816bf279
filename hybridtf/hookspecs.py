"""Every hook of hybridtf. A plugin implements those it needs with ``@hybridtf.hookimpl``, and returns what it adds.

All hooks collect: each plugin's result is added to the others', order does not matter, and built-ins come through the same
hooks. Config classes and presets are refused when their name is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pluggy

from hybridtf.core import ComponentConfig, Kernel, OpCase, Preset

hookspec = pluggy.HookspecMarker("hybridtf")
hookimpl = pluggy.HookimplMarker("hybridtf")


@hookspec
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    """Sequence mixers: config classes that subclass ``SequenceMixerConfig``, and presets of them."""
    return ()


@hookspec
def hybridtf_channel_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    """Channel mixers: config classes that subclass ``ChannelMixerConfig``, and presets of them."""
    return ()


@hookspec
def hybridtf_blocks() -> Sequence[type[ComponentConfig] | Preset]:
    """Blocks: config classes that subclass ``BlockConfig``."""
    return ()


@hookspec
def hybridtf_norms() -> Sequence[type[ComponentConfig] | Preset]:
    """Norms: config classes that subclass ``NormConfig``."""
    return ()


@hookspec
def hybridtf_positions() -> Sequence[type[ComponentConfig] | Preset]:
    """Positions: config classes that subclass ``PositionConfig``."""
    return ()


@hookspec
def hybridtf_stems() -> Sequence[type[ComponentConfig] | Preset]:
    """Stems: config classes that subclass ``StemConfig``."""
    return ()


@hookspec
def hybridtf_heads() -> Sequence[type[ComponentConfig] | Preset]:
    """Heads: config classes that subclass ``HeadConfig``."""
    return ()


@hookspec
def hybridtf_models() -> Sequence[type[ComponentConfig] | Preset]:
    """Models: config classes that subclass ``ModelConfig``."""
    return ()


@hookspec
def hybridtf_kernels() -> Sequence[Kernel]:
    """Kernels: records that say which op they implement, why they cannot run a request, and how to load them."""
    return ()


@hookspec
def hybridtf_op_cases() -> Sequence[OpCase]:
    """Ways to call an op, drawn at random: the contract kit holds every kernel of the op to its reference on them."""
    return ()


@hookspec
def hybridtf_tasks() -> Sequence[type[ComponentConfig] | Preset]:
    """Tasks: config classes that subclass ``TaskConfig``."""
    return ()


@hookspec
def hybridtf_recipes() -> Sequence[Path]:
    """Recipes: folders of ``.toml`` files, addressed by their path inside the folder without the ending."""
    return ()
