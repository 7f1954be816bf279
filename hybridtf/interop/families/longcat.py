"""LongCat-Flash: two layers of latent attention and dense channels, and experts whose result joins only after both."""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.latents import latent, latent_settings, link_latent
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

LAYER = ("s", "a", "i")
"""Blocks of one of their layers: the first half with its shortcut, the second half, and where the shortcut joins."""


def _mixer(settings: Settings) -> Table:
    """Queries are always of a latent, and both latents are scaled."""
    settings.values.setdefault("num_key_value_heads", settings.count("num_attention_heads"))
    if settings.values.get("rope_theta") is None:
        settings.values["rope_theta"] = 10000000.0
    settings.only("attention_method", "MLA")
    settings.only("mla_scale_q_lora", True)
    settings.only("mla_scale_kv_lora", True)
    mixer, width = latent(settings, interleaved=True), settings.count("hidden_size")
    settings.only("qk_head_dim", mixer["qk_nope_head_dim"] + mixer["qk_rope_head_dim"])
    rank = settings.count("q_lora_rank", 1536)
    scales = {"q_latent_scale": (width / rank) ** 0.5, "kv_latent_scale": (width / mixer["kv_lora_rank"]) ** 0.5}
    return {**mixer, "q_lora_rank": rank, **scales}


def _longcat(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    settings.only("router_bias", False)
    settings.only("norm_topk_prob", False)
    settings.only("zero_expert_type", "identity")
    n = settings.count("num_layers", 28)
    settings.only("num_hidden_layers", 2 * n)
    norm, mixer = parts.norm(settings, default=1e-5), _mixer(settings)
    dense = parts.gated(settings, settings.count("ffn_hidden_size", 12288))
    experts = {
        "type": "moe", "n_experts": settings.count("n_routed_experts", 512), "scores": "softmax", "normalize": False,
        "n_identity": settings.take("zero_expert_num", 256, kind=int), "top_k": settings.count("moe_topk", 12),
        "d_ff": settings.count("expert_ffn_hidden_size", 2048), "selection_bias": "fixed",
        "routed_scale": settings.number("routed_scaling_factor", 6.0),
    }
    half = {"mixer": mixer, "channel_mixer": dense, "norm": norm}
    blocks = {"s": {"type": "shortcut", **half, "shortcut": experts}, "a": half, "i": {"type": "inject", "edge": "shortcut"}}
    return {
        **parts.ends(settings, tied=False), "final_norm": norm, "blocks": blocks, "pattern": f"({' '.join(LAYER)})*{n}",
    }


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    links.passed_over("model.mtp.")
    block = parts.first_block(config)
    experts = block.shortcut
    for i in range(len(config.layers()) // len(LAYER)):
        theirs = f"model.layers.{i}"
        for half in (0, 1):
            ours = f"stack.layers.{len(LAYER) * i + half}"
            links.same(f"{ours}.mixer_norm", f"{theirs}.input_layernorm.{half}")
            links.same(f"{ours}.channel_norm", f"{theirs}.post_attention_layernorm.{half}")
            link_latent(links, f"{ours}.mixer", f"{theirs}.self_attn.{half}")
            parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlps.{half}")
        ours = f"stack.layers.{len(LAYER) * i}.shortcut"
        links.same(f"{ours}.router", f"{theirs}.mlp.router.classifier")
        links.same(f"{ours}.selection.bias", f"{theirs}.mlp.router.e_score_correction_bias")
        parts.link_experts(links, f"{ours}.experts", f"{theirs}.mlp.experts", experts.n_experts)
        for e in range(experts.n_experts, experts.n_scored):
            for name in ("gate_proj", "up_proj"):  # transformers has rows for them that nothing reads
                links.unused(f"{theirs}.mlp.experts.{e}.{name}.weight", (experts.d_ff, config.d_model))


def _settings(config: LanguageModelConfig) -> Table:
    layers = config.layers()
    block: Any = config.blocks[layers[0]]
    mixer, experts, n = block.mixer, block.shortcut, len(layers) // len(LAYER)
    if len(layers) != n * len(LAYER):
        raise CheckpointError(f"{len(layers)} layers are no whole number of {len(LAYER)}")
    return {
        **parts.ends_settings(config), **latent_settings(mixer), "num_layers": n, "num_hidden_layers": 2 * n,
        "qk_head_dim": mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, "head_dim": mixer.qk_rope_head_dim,
        "rms_norm_eps": block.norm.eps, "hidden_act": "silu", "ffn_hidden_size": block.channel_mixer.d_ff,
        "n_routed_experts": experts.n_experts, "zero_expert_num": experts.n_identity, "moe_topk": experts.top_k,
        "expert_ffn_hidden_size": experts.d_ff, "routed_scaling_factor": experts.routed_scale,
    }


FAMILIES = (Family("longcat_flash", "LongcatFlashForCausalLM", _longcat, _link, _settings),)
