"""OLMo, OLMo 2 and OLMoE: norms without weights, norms of what branches give, norms of all heads side by side."""

from __future__ import annotations

from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, link, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

PLAIN: Table = {"type": "layer_norm", "eps": 1e-5, "weight": False, "bias": False}
"""OLMo's norm, which no setting changes."""


def _attention(settings: Settings, *, clips: bool = True) -> Table:
    table = {**heads(settings), "position": rope(settings)}
    clip = settings.number("clip_qkv", None) if clips else None
    if settings.flag("attention_bias", False):
        table |= {"qkv_bias": True, "out_bias": True}
    return table if clip is None else {**table, "qkv_clip": clip}


def _stack(settings: Settings, block: Table, final: Table) -> Table:
    return {**parts.ends(settings, tied=False), "final_norm": final, **stack_of([block] * settings.count("num_hidden_layers"))}


def _olmo(settings: Settings) -> Table:
    channel = parts.gated(settings, settings.count("intermediate_size"))
    return _stack(settings, {"mixer": _attention(settings), "channel_mixer": channel, "norm": PLAIN}, PLAIN)


def _olmo2(settings: Settings) -> Table:
    norm = parts.norm(settings, default=1e-5)
    block = {
        "type": "output_norm", "norm": norm,
        "mixer": {**_attention(settings, clips=False), "qk_norm": norm, "qk_norm_over": "heads"},
        "channel_mixer": parts.gated(settings, settings.count("intermediate_size")),
    }
    return _stack(settings, block, norm)


def _olmoe(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    norm = parts.norm(settings, default=1e-5)
    experts = {
        "type": "moe", "n_experts": settings.count("num_experts", 64), "top_k": settings.count("num_experts_per_tok", 8),
        "d_ff": settings.count("intermediate_size"), "normalize": settings.flag("norm_topk_prob", False),
    }
    mixer = {**_attention(settings), "qk_norm": norm, "qk_norm_over": "heads"}
    return _stack(settings, {"mixer": mixer, "channel_mixer": experts, "norm": norm}, norm)


def _link_olmo2(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for i in range(len(config.layers())):
        ours, theirs = f"stack.layers.{i}", f"model.layers.{i}"
        links.same(f"{ours}.mixer_post_norm", f"{theirs}.post_attention_layernorm")
        links.same(f"{ours}.channel_post_norm", f"{theirs}.post_feedforward_layernorm")
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


def _settings(config: LanguageModelConfig) -> Table:
    block: Any = config.blocks[config.layers()[0]]
    return {**settings_of(config), "attention_bias": block.mixer.qkv_bias, "clip_qkv": block.mixer.qkv_clip}


def _olmo_settings(config: LanguageModelConfig) -> Table:
    return {name: value for name, value in _settings(config).items() if name != "rms_norm_eps"}


def _olmo2_settings(config: LanguageModelConfig) -> Table:
    return {name: value for name, value in _settings(config).items() if name != "clip_qkv"}


def _olmoe_settings(config: LanguageModelConfig) -> Table:
    block: Any = config.blocks[config.layers()[0]]
    moe = block.channel_mixer
    return {
        **_settings(config), "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff,
        "norm_topk_prob": moe.normalize, "hidden_act": "silu",
    }


FAMILIES = (
    Family("olmo", "OlmoForCausalLM", _olmo, link, _olmo_settings),
    Family("olmo2", "Olmo2ForCausalLM", _olmo2, _link_olmo2, _olmo2_settings),
    Family("olmoe", "OlmoeForCausalLM", _olmoe, link, _olmoe_settings),
)
