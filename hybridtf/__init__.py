"""hybridtf: research on hybrid sequence architectures, from a recipe to a table one can cite.

The names below are loaded when they are first used, so that importing hybridtf costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtf.bench import compare
    from hybridtf.core import (
        BuildContext,
        ChannelMixer,
        ChannelMixerConfig,
        Component,
        ConfigError,
        Fixed,
        Growing,
        HybridTFError,
        Kernel,
        KernelRequest,
        ParamSpec,
        Preset,
        Ring,
        Segments,
        SequenceMixer,
        SequenceMixerConfig,
        TaskConfig,
        concat_rows,
        crop,
        init,
        reorder,
        restore,
        snapshot,
    )
    from hybridtf.hookspecs import hookimpl
    from hybridtf.models import (
        BeamConfig,
        GenerationConfig,
        LanguageModelConfig,
        beam_search,
        generate,
        read_prompt,
        speculate,
        stream,
    )
    from hybridtf.recipe import Recipe, load_recipe, to_toml
    from hybridtf.train import load_model, load_run, save_model, train

__version__ = "0.1.0"

_WHERE = {
    "core": (
        "BuildContext", "ChannelMixer", "ChannelMixerConfig", "Component", "ConfigError", "Fixed", "Growing", "HybridTFError",
        "Kernel", "KernelRequest", "ParamSpec", "Preset", "Ring", "Segments", "SequenceMixer", "SequenceMixerConfig",
        "TaskConfig", "concat_rows", "crop", "init", "reorder", "restore", "snapshot",
    ),
    "hookspecs": ("hookimpl",),
    "models": (
        "BeamConfig", "GenerationConfig", "LanguageModelConfig", "beam_search", "generate", "read_prompt", "speculate",
        "stream",
    ),
    "recipe": ("Recipe", "load_recipe", "to_toml"),
    "train": ("load_model", "load_run", "save_model", "train"),
    "bench": ("compare",),
}
_ROOM = {name: room for room, names in _WHERE.items() for name in names}

__all__ = [
    "BeamConfig", "BuildContext", "ChannelMixer", "ChannelMixerConfig", "Component", "ConfigError", "Fixed",
    "GenerationConfig", "Growing", "HybridTFError", "Kernel", "KernelRequest", "LanguageModelConfig", "ParamSpec",
    "Preset", "Recipe", "Ring", "Segments", "SequenceMixer", "SequenceMixerConfig", "TaskConfig", "beam_search",
    "compare", "concat_rows", "crop", "generate", "hookimpl", "init", "load_model", "load_recipe", "load_run",
    "read_prompt", "reorder", "restore", "save_model", "snapshot", "speculate", "stream", "to_toml", "train",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'hybridtf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridtf.{_ROOM[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
