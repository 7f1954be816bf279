"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.bigbird import BigBird, BigBirdConfig
from hybridtf.mixers.chunked_attention import ChunkedAttention, ChunkedAttentionConfig
from hybridtf.mixers.dilated import Dilated, DilatedConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.longformer import Longformer, LongformerConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import Mamba2, Mamba2Config
from hybridtf.mixers.moba import Moba, MobaConfig
from hybridtf.mixers.rg_lru import GriffinRecurrent, GriffinRecurrentConfig, RGLRUConfig, RGLRUMixer
from hybridtf.mixers.rnn import GRUConfig, LSTMConfig, Recurrent, RecurrentConfig, RNNConfig
from hybridtf.mixers.strided_sparse import StridedSparse, StridedSparseConfig

__all__ = [
    "Attention", "AttentionConfig", "BigBird", "BigBirdConfig", "ChunkedAttention", "ChunkedAttentionConfig", "Dilated",
    "DilatedConfig", "GRUConfig", "GriffinRecurrent", "GriffinRecurrentConfig", "LSTMConfig", "LinearAttention",
    "LinearAttentionConfig", "Longformer", "LongformerConfig", "Mamba", "Mamba2", "Mamba2Config", "MambaConfig", "Moba",
    "MobaConfig", "RGLRUConfig", "RGLRUMixer", "RNNConfig", "Recurrent", "RecurrentConfig", "StridedSparse",
    "StridedSparseConfig",
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
        DilatedConfig,
        StridedSparseConfig,
        ChunkedAttentionConfig,
        LongformerConfig,
        BigBirdConfig,
        MobaConfig,
    )
