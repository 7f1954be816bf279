"""Residual wirings, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.blocks.parallel import Parallel, ParallelConfig
from hybridtf.blocks.prenorm import PreNorm, PreNormConfig
from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl

__all__ = ["Parallel", "ParallelConfig", "PreNorm", "PreNormConfig"]


@hookimpl
def hybridtf_blocks() -> Sequence[type[ComponentConfig]]:
    return (PreNormConfig, ParallelConfig)
