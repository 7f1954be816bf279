"""Small parts that are not mixers: norms, positions, the short convolution, activations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.nn.activations import Activation, GateOptions, activation
from hybridtf.nn.affine import ChannelAffine
from hybridtf.nn.altup import AlternatingUpdates
from hybridtf.nn.bottleneck import Bottleneck
from hybridtf.nn.counts import n_real
from hybridtf.nn.depth_attention import DepthAttention, DepthOptions, group_sum, group_sums
from hybridtf.nn.diagonal_ssm import DiagonalInit, DiagonalSSM, Discretisation, discretised, filled_with, multiply
from hybridtf.nn.dplr_ssm import DPLRSSM
from hybridtf.nn.factors import Factor, FactorConfig
from hybridtf.nn.feature_maps import FEATURE_MAPS, FeatureMap, quadratic, taylor
from hybridtf.nn.forget_sums import forget_sums
from hybridtf.nn.head_projections import GroupedHeadsConfig, HeadCountsConfig, HeadProjections, HeldHeads, ValueHeadsConfig
from hybridtf.nn.heads_mixer import HeadsConfig, HeadsMixer, NormOver
from hybridtf.nn.hippo import diagonal_hippo, hippo_legs
from hybridtf.nn.implicit_filter import ImplicitFilter
from hybridtf.nn.indexed_mixer import IndexedMixer, indexer_kl
from hybridtf.nn.indexer import IndexedConfig, refuse_spans
from hybridtf.nn.latent_mixer import LatentConfig, LatentMixer
from hybridtf.nn.limits import PositiveRange, PowerOfTwo, idle_beside
from hybridtf.nn.linear_heads import LinearHeads, Written, head_count, head_width, retention_log_decay
from hybridtf.nn.low_rank import Adapted, LoraLinear, LoraOptions, LowRank, merge_low_rank
from hybridtf.nn.lower_bounds import LowerBounds, log_forget
from hybridtf.nn.memory_mixer import MemoryConfig, MemoryMixer
from hybridtf.nn.message_gate import MessageGate
from hybridtf.nn.ngrams import HashedNgrams
from hybridtf.nn.norms import (
    GatedRMSNorm,
    GroupNormConfig,
    HeadRMSNorm,
    L2Clip,
    L2Norm,
    L2NormConfig,
    LayerNorm,
    LayerNormConfig,
    NoNorm,
    NoNormConfig,
    RMSNorm,
    RMSNormConfig,
    accumulation_dtype,
    l2_normalised,
)
from hybridtf.nn.pooled import Ended, empty_pooled, ended, entries_seen, pooled_with, tokens_of
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
    ProportionalScaling,
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
from hybridtf.nn.positions.angles import wide_dtype
from hybridtf.nn.ramps import channel_pattern, channel_ramp, layer_depth, scaled_orthogonal
from hybridtf.nn.random_features import NO_BOUND, RandomFeatures, running_bound
from hybridtf.nn.regularise import DropPath
from hybridtf.nn.residual_conv import ConvForm, DynamicConv, ResidualConv, residual_conv
from hybridtf.nn.rg_lru import RGLRU, HeadLinear
from hybridtf.nn.running_softmax import running_softmax
from hybridtf.nn.scan import ComplexScan, Pair, Scan
from hybridtf.nn.short_conv import HeadConv, ShortConv, ShortConvs, TokenShift, short_convs
from hybridtf.nn.softmax_mixer import KEY_INPUT, VALUE_INPUT, Held, HeldAttention, Projected, SoftmaxMixer
from hybridtf.nn.softplus_decay import SoftplusDecayConfig, softplus_log_decay, time_step
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
    "DPLRSSM", "FEATURE_MAPS", "KEY_INPUT", "NO_BOUND", "RGLRU", "VALUE_INPUT", "Activation", "Adapted", "Alibi",
    "AlibiConfig", "AlternatingUpdates", "Bottleneck", "ChannelAffine", "ComplexScan", "Connected", "Connection",
    "ConvForm", "DepthAttention", "DepthOptions", "DiagonalInit", "DiagonalSSM", "Discretisation", "DropPath",
    "DynamicConv", "DynamicNTKScaling", "Ended", "Factor", "FactorConfig", "FeatureMap", "GateOptions", "GatedConnection",
    "GatedRMSNorm", "GatedStreams", "GroupNormConfig", "GroupedHeadsConfig", "HashedNgrams", "HeadConv", "HeadCountsConfig",
    "HeadLinear", "HeadProjections", "HeadRMSNorm", "HeadsConfig", "HeadsMixer", "Held", "HeldAttention", "HeldHeads",
    "HyperConnection", "ImplicitFilter", "IndexedConfig", "IndexedMixer", "L2Clip", "L2Norm", "L2NormConfig",
    "LatentConfig", "LatentMixer", "LayerNorm", "LayerNormConfig", "LearnedPosition", "LearnedPositionConfig",
    "LinearHeads", "LinearScaling", "Llama3Scaling", "LongRopeScaling", "LoraLinear", "LoraOptions", "LowRank",
    "LowerBounds", "ManifoldConnection", "MemoryConfig", "MemoryMixer", "MessageGate", "NTKScaling", "NoNorm",
    "NoNormConfig", "NoPositionConfig", "NormOver", "Pair", "PositiveRange", "PowerOfTwo", "Projected",
    "ProportionalScaling", "RMSNorm", "RMSNormConfig", "RandomFeatures", "ResidualConv", "Rope", "RopeConfig",
    "RopeScaling", "Scan", "ShortConv", "ShortConvs", "SigmoidStreams", "SinusoidalPosition", "SinusoidalPositionConfig",
    "SoftmaxMixer", "SoftplusDecayConfig", "SparseMixer", "SparseMixerConfig", "TokenShift", "ValueHeadsConfig", "Written",
    "XPos", "XPosConfig", "YarnScaling", "accumulation_dtype", "activation", "channel_pattern", "channel_ramp",
    "diagonal_hippo", "discretised", "empty_pooled", "ended", "entries_seen", "filled_with", "forget_sums", "group_sum",
    "group_sums", "head_count", "head_width", "hippo_legs", "idle_beside", "indexer_kl", "l2_normalised", "layer_depth",
    "log_forget", "merge_low_rank", "multiply", "n_real", "pooled_with", "quadratic", "refuse_spans", "residual_conv",
    "retention_log_decay", "running_bound",
    "running_softmax", "scaled_orthogonal", "short_convs", "softplus_log_decay", "taylor", "time_step", "token_positions",
    "tokens_of", "told", "wide_dtype",
]


@hookimpl
def hybridtf_norms() -> Sequence[type[ComponentConfig]]:
    return (
        RMSNormConfig,
        LayerNormConfig,
        GroupNormConfig,
        L2NormConfig,
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
