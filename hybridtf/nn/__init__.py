"""Small parts that are not mixers: norms, positions, the short convolution, activations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.nn.activations import Activation, GateOptions, activation
from hybridtf.nn.norms import (
    GatedRMSNorm,
    LayerNorm,
    LayerNormConfig,
    RMSNorm,
    RMSNormConfig,
    accumulation_dtype,
)
from hybridtf.nn.positions import LearnedPosition, LearnedPositionConfig, NoPositionConfig, Rope, RopeConfig
from hybridtf.nn.regularise import DropPath
from hybridtf.nn.short_conv import ShortConv

__all__ = [
    "Activation", "DropPath", "GateOptions", "GatedRMSNorm", "LayerNorm", "LayerNormConfig", "LearnedPosition",
    "LearnedPositionConfig", "NoPositionConfig", "RMSNorm", "RMSNormConfig", "Rope", "RopeConfig", "ShortConv",
    "accumulation_dtype", "activation",
]


@hookimpl
def hybridtf_norms() -> Sequence[type[ComponentConfig]]:
    return (RMSNormConfig, LayerNormConfig)


@hookimpl
def hybridtf_positions() -> Sequence[type[ComponentConfig]]:
    return (NoPositionConfig, RopeConfig, LearnedPositionConfig)
