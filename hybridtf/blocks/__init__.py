"""Residual wirings: one branch after the other, or both at once; over one stream or several; and loops."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.blocks.altup import AltUp, AltUpConfig, AltUpSide, AltUpSideConfig
from hybridtf.blocks.attention_residual import AttentionResidual, AttentionResidualConfig
from hybridtf.blocks.beside import Beside, BesideConfig, Guided, GuidedConfig
from hybridtf.blocks.engram import Engram, EngramConfig
from hybridtf.blocks.interpolated import Interpolated, InterpolatedConfig
from hybridtf.blocks.laurel import LaurelOptions
from hybridtf.blocks.looped_residual import LoopedResidual, LoopedResidualConfig
from hybridtf.blocks.loops import InjectConfig, RememberConfig
from hybridtf.blocks.options import LearnedScale
from hybridtf.blocks.parallel import Parallel, ParallelConfig
from hybridtf.blocks.sequential import (
    AffineResidual,
    AffineResidualConfig,
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
from hybridtf.blocks.shortcut import Shortcut, ShortcutConfig
from hybridtf.blocks.streams import GatedResidualConfig, HyperConnectionsConfig, ManifoldConnectionsConfig, Streams
from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl

__all__ = [
    "AffineResidual", "AffineResidualConfig", "AltUp", "AltUpConfig", "AltUpSide", "AltUpSideConfig", "AttentionResidual",
    "AttentionResidualConfig", "Beside", "BesideConfig", "Engram", "EngramConfig", "GatedResidualConfig", "Guided",
    "GuidedConfig", "HyperConnectionsConfig", "InjectConfig", "Interpolated", "InterpolatedConfig", "LaurelOptions",
    "LearnedScale", "LoopedResidual", "LoopedResidualConfig",
    "ManifoldConnectionsConfig", "NormedStream", "NormedStreamConfig", "OutputNorm", "OutputNormConfig", "Parallel",
    "ParallelConfig", "PostNorm", "PostNormConfig", "PreNorm", "PreNormConfig", "RememberConfig", "SandwichConfig",
    "Shortcut", "ShortcutConfig", "Streams",
]


@hookimpl
def hybridtf_blocks() -> Sequence[type[ComponentConfig]]:
    return (
        PreNormConfig, PostNormConfig, SandwichConfig, OutputNormConfig, NormedStreamConfig,
        ParallelConfig, HyperConnectionsConfig, ManifoldConnectionsConfig, GatedResidualConfig,
        AttentionResidualConfig, LoopedResidualConfig, RememberConfig, InjectConfig,
        BesideConfig, GuidedConfig, ShortcutConfig, InterpolatedConfig, EngramConfig, AffineResidualConfig,
        AltUpConfig, AltUpSideConfig,
    )
