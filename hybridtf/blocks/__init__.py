"""Residual wirings: one branch after the other, or both at once; over one stream or several; and loops."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.blocks.altup import AltUp, AltUpConfig, AltUpSide, AltUpSideConfig
from hybridtf.blocks.attention_residual import AttentionResidual, AttentionResidualConfig
from hybridtf.blocks.beside import Beside, BesideConfig, Guided, GuidedConfig
from hybridtf.blocks.laurel import LaurelOptions
from hybridtf.blocks.looped_residual import LoopedResidual, LoopedResidualConfig
from hybridtf.blocks.loops import InjectConfig, RememberConfig
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
from hybridtf.blocks.streams import GatedResidualConfig, HyperConnectionsConfig, ManifoldConnectionsConfig, Streams
from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl

__all__ = [
    "AltUp", "AltUpConfig", "AltUpSide", "AltUpSideConfig", "AttentionResidual", "AttentionResidualConfig", "Beside",
    "BesideConfig", "GatedResidualConfig", "Guided", "GuidedConfig", "HyperConnectionsConfig", "InjectConfig", "LaurelOptions",
    "LearnedScale", "LoopedResidual", "LoopedResidualConfig",
    "ManifoldConnectionsConfig", "NormedStream", "NormedStreamConfig", "OutputNorm", "OutputNormConfig", "Parallel",
    "ParallelConfig", "PostNorm", "PostNormConfig", "PreNorm", "PreNormConfig", "RememberConfig", "SandwichConfig", "Streams",
]


@hookimpl
def hybridtf_blocks() -> Sequence[type[ComponentConfig]]:
    return (
        PreNormConfig, PostNormConfig, SandwichConfig, OutputNormConfig, NormedStreamConfig,
        ParallelConfig, HyperConnectionsConfig, ManifoldConnectionsConfig, GatedResidualConfig,
        AttentionResidualConfig, LoopedResidualConfig, RememberConfig, InjectConfig,
        BesideConfig, GuidedConfig, AltUpConfig, AltUpSideConfig,
    )
