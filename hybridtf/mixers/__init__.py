"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.ema import EMA, EMAConfig
from hybridtf.mixers.gated_short_conv import GatedShortConv, GatedShortConvConfig
from hybridtf.mixers.h3 import H3, H3Config
from hybridtf.mixers.hgrn import HGRN, HGRNConfig
from hybridtf.mixers.hyena import Hyena, HyenaConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.lru import LRU, LRUConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.min_gru import MinGRU, MinGRUConfig, MinLSTM, MinLSTMConfig
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig
from hybridtf.mixers.s4 import S4Config, S4DConfig, StateSpace
from hybridtf.mixers.s5 import S5, S5Config

__all__ = [
    "EMA", "H3", "HGRN", "LRU", "S5", "Attention", "AttentionConfig", "EMAConfig", "GRUConfig", "GatedShortConv",
    "GatedShortConvConfig", "GriffinRecurrent", "GriffinRecurrentConfig", "H3Config", "HGRNConfig", "Hyena", "HyenaConfig",
    "LRUConfig", "LSTMConfig", "LinearAttention", "LinearAttentionConfig", "Mamba", "Mamba2", "Mamba2Config", "MambaConfig",
    "MinGRU", "MinGRUConfig", "MinLSTM", "MinLSTMConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig", "Recurrent",
    "RecurrentConfig", "S4Config", "S4DConfig", "S5Config", "StateSpace",
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
        MinGRUConfig,
        MinLSTMConfig,
        GatedShortConvConfig,
        HGRNConfig,
        EMAConfig,
        LRUConfig,
        S5Config,
        S4Config,
        S4DConfig,
        H3Config,
        HyenaConfig,
    )
