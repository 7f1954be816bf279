"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.feature_attention import (
    Based,
    BasedConfig,
    Cosformer,
    CosformerConfig,
    LinearTransformer,
    LinearTransformerConfig,
    Performer,
    PerformerConfig,
    Rebased,
    RebasedConfig,
)
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import LogLinearConfig, LogLinearMamba2, Mamba2, Mamba2Config
from hybridtf.mixers.retention import (
    LightningAttention,
    LightningAttentionConfig,
    RetNet,
    RetNetConfig,
    SimpleGLA,
    SimpleGLAConfig,
)
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig

__all__ = [
    "Attention", "AttentionConfig", "Based", "BasedConfig", "Cosformer", "CosformerConfig", "GRUConfig", "GriffinRecurrent",
    "GriffinRecurrentConfig", "LSTMConfig", "LightningAttention", "LightningAttentionConfig", "LinearAttention",
    "LinearAttentionConfig", "LinearTransformer", "LinearTransformerConfig", "LogLinearConfig", "LogLinearMamba2", "Mamba",
    "Mamba2", "Mamba2Config", "MambaConfig", "Performer", "PerformerConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig",
    "Rebased", "RebasedConfig", "Recurrent", "RecurrentConfig", "RetNet", "RetNetConfig", "SimpleGLA", "SimpleGLAConfig",
]


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        AttentionConfig, *attention.PRESETS,
        MambaConfig,
        Mamba2Config,
        LogLinearConfig,
        RGLRUConfig,
        GriffinRecurrentConfig,
        LinearAttentionConfig,
        LinearTransformerConfig,
        PerformerConfig,
        CosformerConfig,
        BasedConfig,
        RebasedConfig,
        RetNetConfig,
        LightningAttentionConfig,
        SimpleGLAConfig,
        RNNConfig,
        LSTMConfig,
        GRUConfig,
    )
