"""The plugin: what it adds to hybridtf, one hook a kind."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Kernel, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf_example.gated_ema import GatedEmaConfig
from hybridtf_example.repeat import RepeatConfig
from hybridtf_example.windows import WINDOWS


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (GatedEmaConfig,)


@hookimpl
def hybridtf_kernels() -> Sequence[Kernel]:
    return (WINDOWS,)


@hookimpl
def hybridtf_tasks() -> Sequence[type[ComponentConfig] | Preset]:
    return (RepeatConfig,)
