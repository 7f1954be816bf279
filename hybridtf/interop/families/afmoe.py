"""AFMoE (Trinity): gated attention with normed queries and keys, norms on both sides, sigmoid experts beside shared ones."""

from __future__ import annotations

from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

NORMS = {
    "mixer_norm": "input_layernorm", "mixer_post_norm": "post_attention_layernorm", "channel_norm": "pre_mlp_layernorm",
    "channel_post_norm": "post_mlp_layernorm",
}


def _afmoe(settings: Settings) -> Table:
    for name, said in (
        ("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1), ("num_expert_groups", 1),
        ("num_limited_groups", 1),
    ):
        settings.only(name, said)
    settings.passed_over("load_balance_coeff", "use_grouped_mm")
    every, norm = settings.count("global_attn_every_n_layers", 4), parts.norm(settings, default=1e-5)
    local = parts.near_layers(settings, lambda i: (i + 1) % every == 0)
    attention = {**heads(settings, width=128), "qk_norm": norm, "output_gate": True}
    attention |= parts.biased(settings)
    near = {**attention, "position": rope(settings), "window": settings.count("sliding_window", 1024)}
    full = {**attention, "position": {"type": "none"}}
    dense = parts.gated(settings, settings.count("intermediate_size", 6144))
    d_ff = settings.count("moe_intermediate_size", 1408)
    experts = {
        "type": "moe", "scores": "sigmoid", "selection_bias": "fixed", "n_experts": settings.count("num_experts", 64),
        "top_k": settings.count("num_experts_per_tok", 6), "d_ff": d_ff, "routed_scale": settings.number("route_scale", 1.0),
        "d_ff_shared": d_ff * settings.count("num_shared_experts", 2), "activation": parts.activation(settings),
    }
    n_dense = settings.take("num_dense_layers", 1, kind=int)
    layers = [
        {
            "type": "sandwich", "mixer": near if is_near else full, "channel_mixer": dense if i < n_dense else experts,
            "norm": norm,
        }
        for i, is_near in enumerate(local)
    ]
    table = {**parts.ends(settings, tied=False), "final_norm": norm, **stack_of(layers)}
    scaled = settings.flag("mup_enabled", False)
    return {**table, "stem": {"type": "token_embedding", "scale": "sqrt_d_model"}} if scaled else table


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config, NORMS):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", gate_proj="gate_proj")
        parts.link_channel(
            links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer, router="router.gate", bias="expert_bias"
        )


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    sparse = [block.channel_mixer for block in blocks if hasattr(block.channel_mixer, "n_experts")]
    stem: Any = config.stem
    found = {
        **settings_of(config), **parts.window_settings(config), "attention_bias": blocks[0].mixer.qkv_bias,
        "mup_enabled": stem.scale == "sqrt_d_model", "num_dense_layers": len(blocks) - len(sparse), "pad_token_id": None,
    }
    if not sparse:
        return found
    moe = sparse[0]
    return {
        **found, "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "num_shared_experts": moe.d_ff_shared // moe.d_ff, "route_scale": moe.routed_scale,
        "hidden_act": parts.activation_name(moe.activation),
    }


FAMILIES = (Family("afmoe", "AfmoeForCausalLM", _afmoe, _link, _settings),)
