"""Small parts that are not mixers: norms, positions, the short convolution, activations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.nn.activations import Activation, GateOptions, activation
from hybridtf.nn.counts import n_real
from hybridtf.nn.depth_attention import DepthAttention, DepthOptions, group_sum, group_sums
from hybridtf.nn.diagonal_ssm import DiagonalInit, DiagonalSSM, Discretisation, discretised, filled_with, multiply
from hybridtf.nn.dplr_ssm import DPLRSSM
from hybridtf.nn.feature_maps import FEATURE_MAPS, FeatureMap, quadratic, taylor
from hybridtf.nn.forget_sums import forget_sums
from hybridtf.nn.heads_mixer import HeadCountsConfig, HeadsConfig, HeadsMixer
from hybridtf.nn.hippo import diagonal_hippo, hippo_legs
from hybridtf.nn.implicit_filter import ImplicitFilter
from hybridtf.nn.indexed_mixer import IndexedMixer
from hybridtf.nn.indexer import IndexedConfig
from hybridtf.nn.latent_mixer import LatentConfig, LatentMixer
from hybridtf.nn.limits import PositiveRange, PowerOfTwo
from hybridtf.nn.linear_heads import LinearHeads, Written, head_width, retention_log_decay
from hybridtf.nn.low_rank import Adapted, LoraLinear, LoraOptions, LowRank, merge_low_rank
from hybridtf.nn.lower_bounds import LowerBounds, log_forget
from hybridtf.nn.norms import (
    GatedRMSNorm,
    GroupNormConfig,
    HeadRMSNorm,
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
from hybridtf.nn.random_features import RandomFeatures, running_bound
from hybridtf.nn.regularise import DropPath
from hybridtf.nn.rg_lru import RGLRU, HeadLinear
from hybridtf.nn.scan import ComplexScan, Pair, Scan
from hybridtf.nn.short_conv import HeadConv, ShortConv, ShortConvs, TokenShift
from hybridtf.nn.softmax_mixer import Held, HeldAttention, Projected, SoftmaxMixer
from hybridtf.nn.sparse_mixer import SparseMixer, SparseMixerConfig
from hybridtf.nn.streams import (
    Connected,
    Connection,
    GatedConnection,
    GatedStreams,
    HyperConnection,
    ManifoldConnection,
    SigmoidStreams,
)

__all__ = [
    "DPLRSSM", "FEATURE_MAPS", "RGLRU", "Activation", "Adapted", "Alibi", "AlibiConfig", "ComplexScan", "Connected",
    "Connection", "DepthAttention", "DepthOptions", "DiagonalInit", "DiagonalSSM", "Discretisation", "DropPath",
    "DynamicNTKScaling", "FeatureMap", "GateOptions", "GatedConnection", "GatedRMSNorm", "GatedStreams", "GroupNormConfig",
    "HeadConv", "HeadCountsConfig", "HeadLinear", "HeadRMSNorm", "HeadsConfig", "HeadsMixer", "Held", "HeldAttention",
    "HyperConnection", "ImplicitFilter", "IndexedConfig", "IndexedMixer", "LatentConfig", "LatentMixer", "LayerNorm",
    "LayerNormConfig", "LearnedPosition", "LearnedPositionConfig", "LinearHeads", "LinearScaling", "Llama3Scaling",
    "LongRopeScaling", "LoraLinear", "LoraOptions", "LowRank", "LowerBounds", "ManifoldConnection", "NTKScaling", "NoNorm",
    "NoNormConfig", "NoPositionConfig", "Pair", "PositiveRange", "PowerOfTwo", "Projected", "RMSNorm", "RMSNormConfig",
    "RandomFeatures", "Rope", "RopeConfig", "RopeScaling", "Scan", "ShortConv", "ShortConvs", "SigmoidStreams",
    "SinusoidalPosition", "SinusoidalPositionConfig", "SoftmaxMixer", "SparseMixer", "SparseMixerConfig", "TokenShift",
    "Written", "XPos", "XPosConfig", "YarnScaling", "accumulation_dtype", "activation", "diagonal_hippo", "discretised",
    "filled_with", "forget_sums", "group_sum", "group_sums", "head_width", "hippo_legs", "l2_normalised", "log_forget",
    "merge_low_rank", "multiply", "n_real", "quadratic", "retention_log_decay", "running_bound", "taylor", "token_positions",
    "told",
]


@hookimpl
def hybridtf_norms() -> Sequence[type[ComponentConfig]]:
    return (
        RMSNormConfig,
        LayerNormConfig,
        GroupNormConfig,
        NoNormConfig,
    )


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
