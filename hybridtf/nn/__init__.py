"""Small parts that are not mixers: norms, positions, the short convolution, activations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.nn.activations import Activation, GateOptions, activation
from hybridtf.nn.diagonal_ssm import DiagonalInit, DiagonalSSM, Discretisation, discretised, multiply, pattern
from hybridtf.nn.dplr_ssm import DPLRSSM
from hybridtf.nn.feature_maps import FEATURE_MAPS, FeatureMap
from hybridtf.nn.hippo import diagonal_hippo, hippo_legs
from hybridtf.nn.implicit_filter import ImplicitFilter
from hybridtf.nn.lower_bounds import LowerBounds, log_forget
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
    l2_normalised,
)
from hybridtf.nn.positions import (
    Alibi,
    AlibiConfig,
    DynamicNTKScaling,
    LearnedPosition,
    LearnedPositionConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPositionConfig,
    NTKScaling,
    Rope,
    RopeConfig,
    RopeScaling,
    SinusoidalPosition,
    SinusoidalPositionConfig,
    XPos,
    XPosConfig,
    YarnScaling,
    token_positions,
    told,
)
from hybridtf.nn.regularise import DropPath
from hybridtf.nn.rg_lru import RGLRU
from hybridtf.nn.scan import ComplexScan, Pair, Scan
from hybridtf.nn.short_conv import ShortConv, ShortConvs, TokenShift

__all__ = [
    "DPLRSSM", "FEATURE_MAPS", "RGLRU", "Activation", "Alibi", "AlibiConfig", "ComplexScan", "DiagonalInit", "DiagonalSSM",
    "Discretisation", "DropPath", "DynamicNTKScaling", "FeatureMap", "GateOptions", "GatedRMSNorm", "GroupNormConfig",
    "ImplicitFilter", "LayerNorm", "LayerNormConfig", "LearnedPosition", "LearnedPositionConfig", "LinearScaling",
    "Llama3Scaling", "LongRopeScaling", "LowerBounds", "NTKScaling", "NoNorm", "NoNormConfig", "NoPositionConfig", "Pair",
    "RMSNorm", "RMSNormConfig", "Rope", "RopeConfig", "RopeScaling", "Scan", "ShortConv", "ShortConvs",
    "SinusoidalPosition", "SinusoidalPositionConfig", "TokenShift", "XPos", "XPosConfig", "YarnScaling",
    "accumulation_dtype", "activation", "diagonal_hippo", "discretised", "hippo_legs", "l2_normalised", "log_forget",
    "multiply", "pattern", "token_positions", "told",
]


@hookimpl
def hybridtf_norms() -> Sequence[type[ComponentConfig]]:
    return (RMSNormConfig, LayerNormConfig, GroupNormConfig, NoNormConfig)


@hookimpl
def hybridtf_positions() -> Sequence[type[ComponentConfig]]:
    return (
        NoPositionConfig,
        RopeConfig,
        XPosConfig,
        AlibiConfig,
        LearnedPositionConfig,
        SinusoidalPositionConfig,
    )
