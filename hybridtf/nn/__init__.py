"""Small parts that are not mixers: norms, positions, the short convolution, activations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.nn.activations import Activation, activation
from hybridtf.nn.norms import (
    GatedRMSNorm,
    GroupNormConfig,
    LayerNorm,
    LayerNormConfig,
    NoNorm,
    NoNormConfig,
    RMSNorm,
    RMSNormConfig,
    accumulation_dtype,
)
from hybridtf.nn.positions import LearnedPosition, LearnedPositionConfig, NoPositionConfig, Rope, RopeConfig
from hybridtf.nn.regularise import DropPath
from hybridtf.nn.rg_lru import RGLRU
from hybridtf.nn.short_conv import ShortConv

__all__ = [
    "RGLRU", "Activation", "DropPath", "GatedRMSNorm", "GroupNormConfig", "LayerNorm", "LayerNormConfig", "LearnedPosition",
    "LearnedPositionConfig", "NoNorm", "NoNormConfig", "NoPositionConfig", "RMSNorm", "RMSNormConfig", "Rope", "RopeConfig",
    "ShortConv", "accumulation_dtype", "activation",
]


@hookimpl
def hybridtf_norms() -> Sequence[type[ComponentConfig]]:
    return (RMSNormConfig, LayerNormConfig, GroupNormConfig, NoNormConfig)


@hookimpl
def hybridtf_positions() -> Sequence[type[ComponentConfig]]:
    return (NoPositionConfig, RopeConfig, LearnedPositionConfig)
