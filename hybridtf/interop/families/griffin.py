"""RecurrentGemma: Griffin's recurrence with attention to a window."""

from __future__ import annotations

from typing import Any

import torch

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

_NAMES = {
    "gate_proj": "linear_y", "in_proj": "linear_x", "out_proj": "linear_out", "rg_lru.Lambda": "rg_lru.recurrent_param",
    "rg_lru.recurrence_gate.weight": "rg_lru.recurrent_gate_weight",
    "rg_lru.recurrence_gate.bias": "rg_lru.recurrent_gate_bias",
    "rg_lru.input_gate.weight": "rg_lru.input_gate_weight", "rg_lru.input_gate.bias": "rg_lru.input_gate_bias",
}
"""Parts of the recurrent mixer, ours and theirs."""


def _kinds(settings: Settings) -> list[str]:
    """``recurrent`` or ``attention`` of each layer; those named repeat."""
    said = settings.take("block_types", ["recurrent", "recurrent", "attention"], kind=list)
    if not said or set(said) - {"recurrent", "attention"}:
        raise CheckpointError(f"{settings.where}: block_types is {said}; known here: recurrent, attention")
    settings.passed_over("layers_block_type", "layer_types", "_block_types")
    return [said[i % len(said)] for i in range(settings.count("num_hidden_layers"))]


def _table(settings: Settings) -> Table:
    norm = {**parts.norm(settings), "unit_offset": True}
    d_model, n_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    settings.only("head_dim", d_model // n_heads)
    settings.only("embeddings_scale_by_sqrt_dim", True)
    settings.passed_over("w_init_variance_scale", "final_w_init_variance_scale")
    act, width = parts.activation(settings, "hidden_activation", "gelu_tanh"), settings.count("lru_width", d_model)
    d_conv = settings.count("conv1d_width", 4)
    recurrent: Table = {"type": "griffin_recurrent", "n_heads": n_heads, "d_conv": d_conv, "activation": act}
    if width != d_model:
        recurrent["d_inner"] = width
    attention = {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", n_heads), "out_bias": True,
        "window": settings.count("attention_window_size", settings.count("sliding_window", 2048)),
        "qkv_bias": settings.flag("attention_bias", False), "position": rope(settings, fraction=0.5),
    }
    channel = {"type": "glu", "d_ff": settings.count("intermediate_size") // 2, "activation": act, "bias": True}
    mixers = {"recurrent": recurrent, "attention": attention}
    layers = [{"mixer": mixers[kind], "channel_mixer": channel, "norm": norm} for kind in _kinds(settings)]
    ends = parts.ends(settings, tied=True)
    cap = settings.number("logits_soft_cap", 30.0)
    return {
        **ends, "max_seq_len": settings.count("max_position_embeddings", 8192), "final_norm": norm, **stack_of(layers),
        "stem": {"type": "token_embedding", "scale": _root(d_model)}, "head": {**ends["head"], "softcap": cap},
    }


def _root(d_model: int) -> float:
    """Of the width, rounded to bfloat16 in every precision."""
    return float(torch.tensor(d_model**0.5, dtype=torch.bfloat16))


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, norm="final_norm")
    for block, ours, theirs in parts.each_layer(links, config, ("temporal_pre_norm", "channel_pre_norm")):
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp_block")
        if block.mixer.type == "griffin_recurrent":
            links.named(f"{ours}.mixer", f"{theirs}.temporal_block", _NAMES)
            links.convolution(f"{ours}.mixer.conv", f"{theirs}.temporal_block.conv_1d")
        else:
            parts.link_attention(links, f"{ours}.mixer", f"{theirs}.temporal_block")


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    recurrent = next((block.mixer for block in blocks if block.mixer.type == "griffin_recurrent"), None)
    attention = next((block.mixer for block in blocks if block.mixer.type != "griffin_recurrent"), None)
    mixer: Any = attention or recurrent
    channel, head = blocks[0].channel_mixer, config.head
    found = {
        **parts.ends_settings(config), "rms_norm_eps": blocks[0].norm.eps, "intermediate_size": 2 * channel.d_ff,
        "hidden_activation": parts.activation_name(channel.activation), "num_attention_heads": mixer.n_heads,
        "block_types": ["recurrent" if block.mixer.type == "griffin_recurrent" else "attention" for block in blocks],
        "logits_soft_cap": getattr(head, "softcap", None),
    }
    if recurrent is not None:
        found |= {"lru_width": recurrent.d_inner or config.d_model, "conv1d_width": recurrent.d_conv}
    if attention is not None:
        found |= {
            "num_key_value_heads": attention.n_kv_heads, "attention_window_size": attention.window,
            "attention_bias": attention.qkv_bias, "rope_parameters": rope_settings(attention.position.to_dict()),
        }
    return found


FAMILIES = (Family("recurrent_gemma", "RecurrentGemmaForCausalLM", _table, _link, _settings),)
