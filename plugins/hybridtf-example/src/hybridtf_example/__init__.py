"""The plugin: what it adds to hybridtf, one hook a kind."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Kernel, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf_example.kernel import KERNEL
from hybridtf_example.mixer import GatedEmaConfig
from hybridtf_example.task import RepeatConfig


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (GatedEmaConfig,)


@hookimpl
def hybridtf_kernels() -> Sequence[Kernel]:
    return (KERNEL,)


@hookimpl
def hybridtf_tasks() -> Sequence[type[ComponentConfig] | Preset]:
    return (RepeatConfig,)
