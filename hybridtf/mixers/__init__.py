"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.comba import Comba, CombaConfig
from hybridtf.mixers.gdn2 import GDN2, GDN2Config
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig
from hybridtf.mixers.rwkv4 import RWKV4, RWKV4Config
from hybridtf.mixers.rwkv7 import RWKV7, RWKV7Config

__all__ = [
    "GDN2",
    "RWKV4",
    "RWKV7",
    "Attention",
    "AttentionConfig",
    "Comba",
    "CombaConfig",
    "GDN2Config",
    "GRUConfig",
    "GriffinRecurrent",
    "GriffinRecurrentConfig",
    "LSTMConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "MambaConfig",
    "RGLRUConfig",
    "RGLRUMixer",
    "RNNConfig",
    "RWKV4Config",
    "RWKV7Config",
    "Recurrent",
    "RecurrentConfig",
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
        RWKV4Config,
        RWKV7Config,
        CombaConfig,
        GDN2Config,
    )
