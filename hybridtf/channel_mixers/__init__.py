"""Channel mixers, one file a family."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.channel_mixers import glu, mlp, moe
from hybridtf.channel_mixers.convolved import Convolved, ConvolvedConfig
from hybridtf.channel_mixers.edge_gate import EdgeGate, EdgeGateConfig
from hybridtf.channel_mixers.glu import GLU, GLUConfig
from hybridtf.channel_mixers.lora import LoraChannelMixer, LoraChannelMixerConfig
from hybridtf.channel_mixers.mlp import MLP, MLPConfig
from hybridtf.channel_mixers.moe import MoE, MoEConfig
from hybridtf.channel_mixers.parallel import ParallelChannelMixers, ParallelChannelMixersConfig
from hybridtf.channel_mixers.rwkv import RWKV4ChannelConfig, RWKV6ChannelConfig, RWKV7ChannelConfig, RWKVChannel
from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl

__all__ = [
    "GLU", "MLP", "Convolved", "ConvolvedConfig", "EdgeGate", "EdgeGateConfig", "GLUConfig", "LoraChannelMixer",
    "LoraChannelMixerConfig", "MLPConfig", "MoE", "MoEConfig", "ParallelChannelMixers", "ParallelChannelMixersConfig",
    "RWKV4ChannelConfig", "RWKV6ChannelConfig", "RWKV7ChannelConfig", "RWKVChannel",
]


@hookimpl
def hybridtf_channel_mixers() -> Sequence[type[ComponentConfig] | Preset]:
    return (
        MLPConfig,
        GLUConfig,
        MoEConfig,
        LoraChannelMixerConfig,
        ConvolvedConfig,
        ParallelChannelMixersConfig,
        EdgeGateConfig,
        *mlp.PRESETS,
        *glu.PRESETS,
        *moe.PRESETS,
        RWKV4ChannelConfig,
        RWKV6ChannelConfig,
        RWKV7ChannelConfig,
    )
