"""Sequence mixers, one file a family. Mixers do not import each other: what two share is an op or a part in ``nn``."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.mixers import attention, compressed_attention, forgetting_attention, indexed_attention, relative_attention
from hybridtf.mixers.attention import Attention, AttentionConfig
from hybridtf.mixers.bidirectional import Bidirectional, BidirectionalConfig
from hybridtf.mixers.bigbird import BigBird, BigBirdConfig
from hybridtf.mixers.block_indexed_attention import BlockIndexedAttention, BlockIndexedAttentionConfig
from hybridtf.mixers.cca import CCA, CCAConfig
from hybridtf.mixers.chunked_attention import ChunkedAttention, ChunkedAttentionConfig
from hybridtf.mixers.comba import Comba, CombaConfig
from hybridtf.mixers.compressed_attention import CompressedAttention, CompressedAttentionConfig
from hybridtf.mixers.cross_attention import CrossAttention, CrossAttentionConfig
from hybridtf.mixers.delta_rule import (
    KDA,
    DeltaNet,
    DeltaNetConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GatedDeltaProduct,
    GatedDeltaProductConfig,
    KDAConfig,
)
from hybridtf.mixers.differential_attention import DifferentialAttention, DifferentialAttentionConfig
from hybridtf.mixers.dilated import Dilated, DilatedConfig
from hybridtf.mixers.ema import EMA, EMAConfig
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
from hybridtf.mixers.forgetting_attention import ForgettingAttention, ForgettingAttentionConfig
from hybridtf.mixers.gated_attention import GatedAttention, GatedAttentionConfig
from hybridtf.mixers.gated_short_conv import GatedShortConv, GatedShortConvConfig
from hybridtf.mixers.gdn2 import GDN2, GDN2Config
from hybridtf.mixers.gla import GLA, GLAConfig
from hybridtf.mixers.gsa import GSA, GSAConfig
from hybridtf.mixers.h3 import H3, H3Config
from hybridtf.mixers.hgrn import HGRN, HGRNConfig
from hybridtf.mixers.hgrn2 import HGRN2, HGRN2Config
from hybridtf.mixers.hyena import Hyena, HyenaConfig
from hybridtf.mixers.indexed_attention import IndexedAttention, IndexedAttentionConfig, IndexedMLA, IndexedMLAConfig
from hybridtf.mixers.lightnet import LightNet, LightNetConfig
from hybridtf.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from hybridtf.mixers.longformer import Longformer, LongformerConfig
from hybridtf.mixers.lora import LoraMixer, LoraMixerConfig
from hybridtf.mixers.lru import LRU, LRUConfig
from hybridtf.mixers.mamba import Mamba, MambaConfig
from hybridtf.mixers.mamba2 import LogLinearConfig, LogLinearMamba2, Mamba2, Mamba2Config
from hybridtf.mixers.mamba3 import Mamba3, Mamba3Config
from hybridtf.mixers.mesa import Mesa, MesaConfig
from hybridtf.mixers.meta_tokens import MetaTokens, MetaTokensConfig
from hybridtf.mixers.min_gru import MinGRU, MinGRUConfig, MinLSTM, MinLSTMConfig
from hybridtf.mixers.mla import MLA, MLAConfig
from hybridtf.mixers.mlstm import MLSTM, MLSTMConfig
from hybridtf.mixers.moba import Moba, MobaConfig
from hybridtf.mixers.multi_scale import MultiScale, MultiScaleConfig
from hybridtf.mixers.nsa import NSA, NSAConfig
from hybridtf.mixers.parallel import ParallelMixers, ParallelMixersConfig
from hybridtf.mixers.path_attention import PathAttention, PathAttentionConfig
from hybridtf.mixers.relative_attention import RelativeAttention, RelativeAttentionConfig
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
from hybridtf.mixers.rwkv4 import RWKV4, RWKV4Config
from hybridtf.mixers.rwkv6 import RWKV5, RWKV6, RWKV5Config, RWKV6Config
from hybridtf.mixers.rwkv7 import RWKV7, RWKV7Config
from hybridtf.mixers.s4 import S4Config, S4DConfig, StateSpace
from hybridtf.mixers.s5 import S5, S5Config
from hybridtf.mixers.slstm import SLSTM, SLSTMConfig
from hybridtf.mixers.stick_breaking import StickBreaking, StickBreakingConfig
from hybridtf.mixers.strided_sparse import StridedSparse, StridedSparseConfig
from hybridtf.mixers.talking_heads import TalkingHeads, TalkingHeadsConfig
from hybridtf.mixers.tiled_attention import TiledAttention, TiledAttentionConfig
from hybridtf.mixers.titans import Titans, TitansConfig
from hybridtf.mixers.ttt import TTTLinear, TTTLinearConfig

__all__ = [
    "CCA", "EMA", "GDN2", "GLA", "GSA", "H3", "HGRN", "HGRN2", "KDA", "LRU", "MLA", "MLSTM", "NSA", "RWKV4", "RWKV5", "RWKV6",
    "RWKV7", "S5", "SLSTM", "Attention", "AttentionConfig", "Based", "BasedConfig", "Bidirectional", "BidirectionalConfig",
    "BigBird", "BigBirdConfig", "BlockIndexedAttention", "BlockIndexedAttentionConfig",
    "CCAConfig", "ChunkedAttention", "ChunkedAttentionConfig", "Comba", "CombaConfig",
    "CompressedAttention", "CompressedAttentionConfig",
    "Cosformer", "CosformerConfig", "CrossAttention", "CrossAttentionConfig", "DeltaNet", "DeltaNetConfig",
    "DifferentialAttention", "DifferentialAttentionConfig", "Dilated", "DilatedConfig", "EMAConfig", "ForgettingAttention",
    "ForgettingAttentionConfig", "GDN2Config", "GLAConfig", "GRUConfig", "GSAConfig", "GatedAttention",
    "GatedAttentionConfig", "GatedDeltaNet", "GatedDeltaNetConfig", "GatedDeltaProduct", "GatedDeltaProductConfig",
    "GatedShortConv", "GatedShortConvConfig", "GriffinRecurrent", "GriffinRecurrentConfig", "H3Config", "HGRN2Config",
    "HGRNConfig", "Hyena", "HyenaConfig", "IndexedAttention", "IndexedAttentionConfig", "IndexedMLA", "IndexedMLAConfig",
    "KDAConfig", "LRUConfig", "LSTMConfig", "LightNet", "LightNetConfig", "LightningAttention", "LightningAttentionConfig",
    "LinearAttention", "LinearAttentionConfig", "LinearTransformer", "LinearTransformerConfig", "LogLinearConfig",
    "LogLinearMamba2", "Longformer", "LongformerConfig", "LoraMixer", "LoraMixerConfig", "MLAConfig", "MLSTMConfig", "Mamba",
    "Mamba2", "Mamba2Config", "Mamba3", "Mamba3Config", "MambaConfig", "Mesa", "MesaConfig", "MetaTokens", "MetaTokensConfig",
    "MinGRU", "MinGRUConfig", "MinLSTM", "MinLSTMConfig", "Moba", "MobaConfig", "MultiScale", "MultiScaleConfig", "NSAConfig",
    "ParallelMixers", "ParallelMixersConfig", "PathAttention", "PathAttentionConfig", "Performer", "PerformerConfig",
    "RGLRUConfig", "RGLRUMixer", "RNNConfig", "RWKV4Config", "RWKV5Config", "RWKV6Config", "RWKV7Config", "Rebased",
    "RebasedConfig", "Recurrent", "RecurrentConfig", "RelativeAttention", "RelativeAttentionConfig", "RetNet", "RetNetConfig",
    "S4Config", "S4DConfig", "S5Config", "SLSTMConfig", "SimpleGLA", "SimpleGLAConfig", "StateSpace", "StickBreaking",
    "StickBreakingConfig", "StridedSparse", "StridedSparseConfig", "TTTLinear", "TTTLinearConfig", "TalkingHeads",
    "TalkingHeadsConfig", "TiledAttention", "TiledAttentionConfig", "Titans", "TitansConfig",
]


@hookimpl
def hybridtf_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        AttentionConfig,
        *attention.PRESETS,
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
        GLAConfig,
        HGRN2Config,
        GSAConfig,
        RWKV5Config,
        RWKV6Config,
        RWKV4Config,
        RWKV7Config,
        CombaConfig,
        GDN2Config,
        LogLinearConfig,
        LinearTransformerConfig,
        PerformerConfig,
        CosformerConfig,
        BasedConfig,
        RebasedConfig,
        RetNetConfig,
        LightningAttentionConfig,
        SimpleGLAConfig,
        CCAConfig,
        CrossAttentionConfig,
        DifferentialAttentionConfig,
        GatedAttentionConfig,
        MLAConfig,
        TalkingHeadsConfig,
        TiledAttentionConfig,
        DilatedConfig,
        StridedSparseConfig,
        ChunkedAttentionConfig,
        LongformerConfig,
        BigBirdConfig,
        MobaConfig,
        Mamba3Config,
        MLSTMConfig,
        SLSTMConfig,
        DeltaNetConfig,
        GatedDeltaNetConfig,
        GatedDeltaProductConfig,
        KDAConfig,
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
        TitansConfig,
        TTTLinearConfig,
        MesaConfig,
        LightNetConfig,
        IndexedAttentionConfig,
        IndexedMLAConfig,
        BlockIndexedAttentionConfig,
        CompressedAttentionConfig,
        *compressed_attention.PRESETS,
        *indexed_attention.PRESETS,
        NSAConfig,
        ForgettingAttentionConfig,
        *forgetting_attention.PRESETS,
        PathAttentionConfig,
        RelativeAttentionConfig,
        *relative_attention.PRESETS,
        StickBreakingConfig,
    )
