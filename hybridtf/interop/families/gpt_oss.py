"""gpt-oss: windows in every other layer, attention sinks, biases, and experts with a bounded and shifted gate."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What the settings mean that say nothing of it."""


def _gpt_oss(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    settings.only("swiglu_alpha", 1.702)
    settings.passed_over("initial_context_length", "experts_per_token")  # said again in other words
    local = parts.near_layers(settings, lambda i: i % 2 == 1)
    norm = parts.norm(settings, default=1e-5)
    if "rope_parameters" not in settings and "rope_scaling" not in settings:
        settings.values["rope_scaling"] = YARN
    bias = settings.flag("attention_bias", True)
    attention = {
        **heads(settings, width=64), "qkv_bias": bias, "out_bias": bias, "sinks": True,
        "position": rope(settings, theta=150000.0),
    }
    experts = {
        "type": "moe", "scores": "softmax_top_k", "router_bias": True, "bias": True, "activation": "quick_gelu",
        "up_shift": 1.0, "limit": settings.number("swiglu_limit", 7.0), "n_experts": settings.count("num_local_experts", 128),
        "top_k": settings.count("num_experts_per_tok", 4), "d_ff": settings.count("intermediate_size"),
    }
    window = {"window": settings.count("sliding_window", 128)}
    layers = [
        {"mixer": {**attention, **(window if near else {})}, "channel_mixer": experts, "norm": norm} for near in local
    ]
    return parts.stack(settings, layers, norm)


def _apart(x: list[Tensor]) -> list[Tensor]:
    """Gates and ups, which lie there in turn."""
    return [x[0][..., 0::2], x[0][..., 1::2]]


def _in_turn(x: list[Tensor]) -> list[Tensor]:
    return [torch.stack(x, -1).flatten(-2)]


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for _, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", sinks="sinks")
        links.same(f"{ours}.channel_mixer.router", f"{theirs}.mlp.router")
        mine, yours = f"{ours}.channel_mixer.experts", f"{theirs}.mlp.experts"
        for rest in ("", "_bias"):
            links.link([f"{mine}.gate_proj{rest}", f"{mine}.up_proj{rest}"], [f"{yours}.gate_up_proj{rest}"], _apart, _in_turn)
            links.same(f"{mine}.down_proj{rest}", f"{yours}.down_proj{rest}")


def _settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    moe = block.channel_mixer
    return {
        **settings_of(config), **parts.window_settings(config), "attention_bias": block.mixer.qkv_bias, "hidden_act": "silu",
        "intermediate_size": moe.d_ff, "num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k,
        "swiglu_limit": moe.limit,
    }


FAMILIES = (Family("gpt_oss", "GptOssForCausalLM", _gpt_oss, _link, _settings),)
