"""ZAYA1: compressed convolutional attention, experts whose routers look at a running sum over the layers, and branches that are
added with learned vectors."""

from __future__ import annotations

from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

WHOLE, NEAR = "hybrid", "hybrid_sliding"


def _table(settings: Settings) -> Table:
    settings.only("attention_bias", False)
    settings.only("num_experts_per_tok", 1)
    norm, n_heads = parts.norm(settings, default=1e-5), settings.count("num_attention_heads", 8)
    kinds = parts.kinds(settings, (WHOLE, NEAR), [WHOLE] * settings.count("num_hidden_layers"))
    said = "rope_parameters" in settings
    position = {
        kind: rope(settings, theta=theta, fraction=1.0 if said else 0.5, kind=kind)
        for kind, theta in ((WHOLE, 5000000.0), (NEAR, 10000.0))
    }
    window = {"window": settings.count("sliding_window")} if NEAR in kinds else {}
    settings.passed_over("sliding_window")
    mixer = {
        "type": "cca", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", 2),
        "head_dim": settings.count("head_dim", 128), "d_conv": settings.count("cca_time0", 2),
        "d_conv_head": settings.count("cca_time1", 2),
    }
    moe = {
        "type": "moe", "n_experts": settings.count("num_experts", 16), "n_null": 1, "top_k": 1, "normalize": False,
        "d_ff": settings.count("moe_intermediate_size", 2048), "activation": parts.activation(settings),
        "selection_bias": "fixed", "d_router": settings.count("router_hidden_size", 256), "router_norm": norm,
        "router_state": "auto",
    }
    layers = [
        {
            "type": "affine_residual", "channel_mixer": moe, "norm": norm,
            "mixer": {**mixer, "position": {"fraction": 1.0, **position[kind]}, **(window if kind == NEAR else {})},
        }
        for kind in kinds
    ]
    table = parts.ends(settings, tied=True)
    if settings.flag("lm_head_bias", False):
        table["head"] = {**table["head"], "bias": True}
    return {**table, "stem": {"type": "token_embedding", "affine": True}, "final_norm": norm, **stack_of(layers)}


_ATTENTION = {
    "q_proj": "qkv_proj.q_proj", "k_proj": "qkv_proj.k_proj", "v_proj_current": "qkv_proj.v_proj_current",
    "v_proj_delayed": "qkv_proj.v_proj_delayed", "conv_bias": "qkv_proj.conv_qk_depthwise.bias",
    "conv_head": "qkv_proj.conv_qk_grouped", "temp": "qk_norm.temp", "out_proj": "o_proj",
}
_ROUTER = {
    "router": "router_mlp.out_proj", "selection.bias": "balancing_biases", "router_network.in_proj": "down_proj",
    "router_network.norm": "router_mlp.norm", "router_network.hidden.0": "router_mlp.fc1",
    "router_network.hidden.1": "router_mlp.fc2", "router_network.state_scale": "router_states_scale",
}


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for one in ("scale", "bias"):
        links.same(f"stem.affine.{one}", f"model.input_hidden_states_{one}")
    for _, ours, theirs in parts.each_layer(links, config):
        for branch, after in (("mixer", "attention"), ("channel", "mlp")):
            for side, there in (("stream", "residual"), ("output", "hidden_states")):
                for one in ("scale", "bias"):
                    at = f"{theirs}.post_{after}_residual_scale.{there}_{one}"
                    links.same(f"{ours}.{branch}_affine.{side}.{one}", at)
        links.named(f"{ours}.mixer", f"{theirs}.self_attn", _ATTENTION)
        links.convolution(f"{ours}.mixer.conv", f"{theirs}.self_attn.qkv_proj.conv_qk_depthwise")
        links.named(f"{ours}.channel_mixer", f"{theirs}.mlp.gate", _ROUTER)
        experts = f"{theirs}.mlp.experts"
        parts.link_fused_experts(links, f"{ours}.channel_mixer.experts", f"{experts}.gate_up_proj", f"{experts}.down_proj")


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mixer, moe = blocks[0].mixer, blocks[0].channel_mixer
    of_kind: dict[str, Any] = dict.fromkeys((WHOLE, NEAR), mixer)
    for block in reversed(blocks):
        of_kind[WHOLE if block.mixer.window is None else NEAR] = block.mixer
    positions = {kind: rope_settings(one.position.to_dict()) for kind, one in of_kind.items()}
    return {
        **parts.ends_settings(config), **parts.NO_TOKENS, "rms_norm_eps": blocks[0].norm.eps,
        "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim or config.d_model // mixer.n_heads, "cca_time0": mixer.d_conv,
        "cca_time1": mixer.d_conv_head, "attention_bias": False, "lm_head_bias": bool(getattr(config.head, "bias", False)),
        "layer_types": [WHOLE if block.mixer.window is None else NEAR for block in blocks],
        "sliding_window": of_kind[NEAR].window,
        "rope_parameters": {kind: {"partial_rotary_factor": 1.0, **one} for kind, one in positions.items()},
        "num_experts": moe.n_experts, "num_experts_per_tok": 1, "moe_intermediate_size": moe.d_ff,
        "router_hidden_size": moe.d_router, "hidden_act": parts.activation_name(moe.activation),
    }


def _notes(config: LanguageModelConfig) -> tuple[str, ...]:
    return ("transformers sets the skip expert's balancing bias to -1 as it loads, whatever the file holds: scores may differ",)


FAMILIES = (Family("zaya", "ZayaForCausalLM", _table, _link, _settings, notes=_notes),)
