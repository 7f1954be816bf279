"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.cca import CCA, CCAConfig
from hybridtf.mixers.cross_attention import CrossAttention, CrossAttentionConfig
from hybridtf.mixers.differential_attention import DifferentialAttention, DifferentialAttentionConfig
from hybridtf.mixers.gated_attention import GatedAttention, GatedAttentionConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.mla import MLA, MLAConfig
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig
from hybridtf.mixers.talking_heads import TalkingHeads, TalkingHeadsConfig
from hybridtf.mixers.tiled_attention import TiledAttention, TiledAttentionConfig

__all__ = [
    "CCA", "MLA", "Attention", "AttentionConfig", "CCAConfig", "CrossAttention", "CrossAttentionConfig",
    "DifferentialAttention", "DifferentialAttentionConfig", "GRUConfig", "GatedAttention", "GatedAttentionConfig",
    "GriffinRecurrent", "GriffinRecurrentConfig", "LSTMConfig", "LinearAttention", "LinearAttentionConfig", "MLAConfig",
    "Mamba", "Mamba2", "Mamba2Config", "MambaConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig", "Recurrent",
    "RecurrentConfig", "TalkingHeads", "TalkingHeadsConfig", "TiledAttention", "TiledAttentionConfig",
]


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        AttentionConfig, *attention.PRESETS,
        CCAConfig,
        CrossAttentionConfig,
        DifferentialAttentionConfig,
        GatedAttentionConfig,
        MLAConfig,
        TalkingHeadsConfig,
        TiledAttentionConfig,
        MambaConfig,
        Mamba2Config,
        RGLRUConfig,
        GriffinRecurrentConfig,
        LinearAttentionConfig,
        RNNConfig,
        LSTMConfig,
        GRUConfig,
    )
