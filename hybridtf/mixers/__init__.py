"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.bidirectional import Bidirectional, BidirectionalConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.lora import LoraMixer, LoraMixerConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.meta_tokens import MetaTokens, MetaTokensConfig
from hybridtf.mixers.multi_scale import MultiScale, MultiScaleConfig
from hybridtf.mixers.parallel import ParallelMixers, ParallelMixersConfig
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig

__all__ = [
    "Attention", "AttentionConfig", "Bidirectional", "BidirectionalConfig", "GRUConfig", "GriffinRecurrent",
    "GriffinRecurrentConfig", "LSTMConfig", "LinearAttention", "LinearAttentionConfig", "LoraMixer", "LoraMixerConfig",
    "Mamba", "Mamba2", "Mamba2Config", "MambaConfig", "MetaTokens", "MetaTokensConfig", "MultiScale", "MultiScaleConfig",
    "ParallelMixers", "ParallelMixersConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig", "Recurrent", "RecurrentConfig",
]


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        AttentionConfig, *attention.PRESETS,
        MambaConfig,
        Mamba2Config,
        RGLRUConfig,
        GriffinRecurrentConfig,
        LinearAttentionConfig,
        RNNConfig,
        LSTMConfig,
        GRUConfig,
        BidirectionalConfig,
        LoraMixerConfig,
        MetaTokensConfig,
        MultiScaleConfig,
        ParallelMixersConfig,
    )
