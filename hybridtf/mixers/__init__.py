"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.mamba3 import Mamba3, Mamba3Config
from hybridtf.mixers.mlstm import MLSTM, MLSTMConfig
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig
from hybridtf.mixers.slstm import SLSTM, SLSTMConfig

__all__ = [
    "MLSTM", "SLSTM", "Attention", "AttentionConfig", "GRUConfig", "GriffinRecurrent", "GriffinRecurrentConfig", "LSTMConfig",
    "LinearAttention", "LinearAttentionConfig", "MLSTMConfig", "Mamba", "Mamba2", "Mamba2Config", "Mamba3", "Mamba3Config",
    "MambaConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig", "Recurrent", "RecurrentConfig", "SLSTMConfig",
]


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        AttentionConfig, *attention.PRESETS,
        MambaConfig,
        Mamba2Config,
        Mamba3Config,
        RGLRUConfig,
        GriffinRecurrentConfig,
        LinearAttentionConfig,
        MLSTMConfig,
        RNNConfig,
        LSTMConfig,
        GRUConfig,
        SLSTMConfig,
    )
