"""Residual wirings: one branch after the other, or both at once."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.blocks.options import LearnedScale
from hybridtf.blocks.parallel import Parallel, ParallelConfig
from hybridtf.blocks.sequential import (
    NormedStream,
    NormedStreamConfig,
    OutputNorm,
    OutputNormConfig,
    PostNorm,
    PostNormConfig,
    PreNorm,
    PreNormConfig,
    SandwichConfig,
)
from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl

__all__ = [
    "LearnedScale", "NormedStream", "NormedStreamConfig", "OutputNorm", "OutputNormConfig", "Parallel", "ParallelConfig",
    "PostNorm", "PostNormConfig", "PreNorm", "PreNormConfig", "SandwichConfig",
]


@hookimpl
def hybridtf_blocks() -> Sequence[type[ComponentConfig]]:
    return (
        PreNormConfig, PostNormConfig, SandwichConfig, OutputNormConfig, NormedStreamConfig,
        ParallelConfig,
    )
