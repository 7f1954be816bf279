"""Windows in some layers and experts scored one by one in some: Laguna, MiMo-V2-Flash, Flint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import decoders, parts
from hybridtf.interop.families.decoders import window, windows_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

FULL, NEAR = "full_attention", "sliding_attention"


# -- settings ----------------------------------------------------------------------------------------------------------


def _kinds(settings: Settings, full: Callable[[int], bool]) -> list[str]:
    """The kind of attention of each layer; ``full``: where the settings do not say."""
    n = settings.count("num_hidden_layers")
    if "layer_types" not in settings:
        settings.values["layer_types"] = [FULL if full(i) else NEAR for i in range(n)]
    return [NEAR if window(settings, i) else FULL for i in range(n)]


def _attention(settings: Settings, layer: int, n_heads: int, n_kv_heads: int, width: int) -> Table:
    """Attention of one layer, without its position."""
    bias, share = settings.flag("attention_bias", False), n_heads * width == settings.count("hidden_size")
    return {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": n_kv_heads, **({} if share else {"head_dim": width}),
        **window(settings, layer), "qkv_bias": bias, "out_bias": bias,
    }


def _experts(settings: Settings, n_experts: int, **more: Any) -> Table:
    return {
        "type": "moe", "scores": "sigmoid", "n_experts": n_experts, "top_k": settings.count("num_experts_per_tok"),
        "d_ff": settings.count("moe_intermediate_size"), "activation": parts.activation(settings), **more,
    }


def _model(settings: Settings, mixers: list[Table], sparse: list[bool], experts: Table) -> Table:
    norm, dense = parts.norm(settings), parts.gated(settings, settings.count("intermediate_size", 1))
    layers = [
        {"mixer": mixer, "channel_mixer": experts if has else dense, "norm": norm}
        for mixer, has in zip(mixers, sparse, strict=True)
    ]
    return parts.stack(settings, layers, norm)


def _laguna(settings: Settings) -> Table:
    n, said = settings.count("num_hidden_layers"), "rope_parameters" in settings
    settings.only("moe_apply_router_weight_on_input", False)
    settings.only("moe_router_logit_softcapping", 0.0)
    per = "channel" if settings.only("gating", True, "per-head", "per-element") == "per-element" else "head"
    position = {
        FULL: rope(settings, theta=500000.0, fraction=1.0 if said else 0.5, kind=FULL), NEAR: rope(settings, kind=NEAR),
    }
    counts = settings.take("num_attention_heads_per_layer", [settings.count("num_attention_heads")] * n, kind=list)
    if len(counts) != n:
        raise CheckpointError(f"{settings.where}: num_attention_heads_per_layer has {len(counts)} entries for {n} layers")
    settings.passed_over("num_attention_heads")
    kv, width, norm = settings.count("num_key_value_heads", 8), settings.count("head_dim", 128), parts.norm(settings)
    gate = {"output_gate": True, "output_gate_per": per, "output_gate_activation": "softplus"}
    mixers = [
        {**_attention(settings, i, counts[i], kv, width), "qk_norm": norm, **gate, "position": position[kind]}
        for i, kind in enumerate(_kinds(settings, lambda i: True))
    ]
    experts = _experts(
        settings, settings.count("num_experts"), norm_eps=0.0, selection_bias="fixed",
        routed_scale=settings.number("moe_routed_scaling_factor", 1.0),
        d_ff_shared=settings.count("shared_expert_intermediate_size", 512),
    )
    return _model(settings, mixers, parts.sparse_layers(settings, 1), experts)


def _mimo(settings: Settings) -> Table:
    settings.values.setdefault("attention_value_scale", 0.707)  # null: none
    if "sliding_window_size" in settings:
        settings.values["sliding_window"] = settings.count("sliding_window_size") + 1  # there it does not count the query
    settings.values.setdefault("rms_norm_eps", 1e-5)
    fraction = 1.0 if "rope_parameters" in settings else 0.334
    _first_file_of_mimo(settings)
    position = {
        FULL: rope(settings, theta=5000000.0, fraction=fraction, kind=FULL), NEAR: rope(settings, fraction=fraction, kind=NEAR),
    }
    n_heads, kv = settings.count("num_attention_heads"), settings.count("num_key_value_heads", 4)
    width = settings.count("head_dim", 192)
    values = {"v_dim": settings.count("v_head_dim", 128), "value_scale": settings.number("attention_value_scale", 1.0)}
    mixers = [
        {
            **_attention(settings, i, n_heads, kv * (2 if kind == NEAR else 1), width), "out_bias": False, **values,
            "sinks": kind == NEAR, "position": position[kind],
        }
        for i, kind in enumerate(_kinds(settings, lambda i: i == 0 or not (i + 1) % 6))
    ]
    groups, chosen = settings.count("n_group", 1), settings.count("topk_group", 1)
    experts = _experts(
        settings, settings.count("n_routed_experts", settings.count("num_local_experts", 256)), selection_bias="fixed",
        routed_scale=settings.number("routed_scaling_factor", 1.0), normalize=settings.flag("norm_topk_prob", True),
        **({"n_groups": groups, "top_k_groups": chosen, "group_score": "top2"} if groups > 1 else {}),
    )
    return _model(settings, mixers, parts.sparse_layers(settings, 1), experts)


def _first_file_of_mimo(settings: Settings) -> None:
    """The published file says in words of its own what transformers has without being told."""
    n, n_heads = settings.count("num_hidden_layers"), settings.count("num_attention_heads")
    near = [int(i > 0 and (i + 1) % 6 > 0) for i in range(n)]
    said = {
        "rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
        "hybrid_layer_pattern": near, "moe_layer_freq": [0] + [1] * (n - 1), "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
        "swa_num_attention_heads": n_heads, "swa_num_key_value_heads": 2 * settings.count("num_key_value_heads", 4),
        "swa_head_dim": settings.count("head_dim", 192), "swa_v_head_dim": settings.count("v_head_dim", 128),
    }
    for name, value in said.items():
        settings.only(name, value)
        settings.values.pop(name, None)


def _flint(settings: Settings) -> Table:
    n = settings.count("num_hidden_layers")
    n_heads, kv = settings.count("num_attention_heads"), settings.count("num_key_value_heads", 4)
    width = settings.count("head_dim", 128)
    norm, position = parts.norm(settings), rope(settings)
    mixers = [
        {
            **_attention(settings, i, n_heads, kv, width), "qk_norm": norm, "sinks": True,
            "position": position if kind == NEAR else {"type": "none"},
        }
        for i, kind in enumerate(_kinds(settings, lambda i: i < 2 or i % 4 == 1 or i == n - 1))
    ]
    dense, step = settings.take("mlp_only_layers", [0, 1], kind=list), settings.count("decoder_sparse_step", 1)
    n_experts = settings.take("num_experts", 256, kind=int)
    sparse = [i not in dense and n_experts > 0 and (i + 1) % step == 0 for i in range(n)]
    experts = _experts(
        settings, n_experts, norm_eps=0.0, normalize=settings.flag("norm_topk_prob", True),
        d_ff_shared=settings.count("shared_expert_intermediate_size", 1024),
    )
    return _model(settings, mixers, sparse, experts)


# -- weights -----------------------------------------------------------------------------------------------------------


def _link(links: WeightMap, config: LanguageModelConfig, names: Mapping[str, str]) -> None:
    """``names``: theirs of what Llama has not, by ours."""
    decoders.link(links, config, norms={**parts.PRENORM, **names})


_LAGUNA = {
    "mixer.gate_proj": "self_attn.g_proj", "channel_mixer.selection.bias": "mlp.experts.e_score_correction_bias",
    "channel_mixer.shared": "mlp.shared_expert",
}
_MIMO = {
    "mixer.sinks": "self_attn.attention_sink_bias", "channel_mixer.selection.bias": "mlp.gate.e_score_correction_bias",
}
_FLINT = {"mixer.sinks": "self_attn.softmax_offset", "channel_mixer.shared": "mlp.shared_expert"}


# -- back --------------------------------------------------------------------------------------------------------------


def _said(config: LanguageModelConfig) -> tuple[list[Any], Any, Table]:
    """The blocks, the experts of the first that has some, and what these families say alike."""
    blocks = parts.blocks_of(config)
    mixer = blocks[0].mixer
    found = {
        **parts.ends_settings(config), "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim or config.d_model // mixer.n_heads, "rms_norm_eps": blocks[0].norm.eps,
        "attention_bias": mixer.qkv_bias, "layer_types": [FULL] * len(blocks), **windows_of(config),
    }
    has = [block.channel_mixer.type == "moe" for block in blocks]
    moe = next(block.channel_mixer for block, sparse in zip(blocks, has, strict=True) if sparse)
    dense = next((block.channel_mixer for block, sparse in zip(blocks, has, strict=True) if not sparse), moe)
    found |= {
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in has], "intermediate_size": dense.d_ff,
        "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "hidden_act": parts.activation_name(moe.activation),
    }
    return blocks, moe, found


def _positions(blocks: list[Any]) -> Table:
    """``rope_parameters`` of both kinds of layer; those of a kind that no layer is of are the other's."""
    first = {kind: next((b for b in blocks if (b.mixer.window is None) == (kind == FULL)), blocks[0]) for kind in (FULL, NEAR)}
    return {kind: rope_settings(block.mixer.position.to_dict()) for kind, block in first.items()}


def _laguna_settings(config: LanguageModelConfig) -> Table:
    blocks, moe, found = _said(config)
    per_head = blocks[0].mixer.output_gate_per == "head"
    return {
        **found, "num_attention_heads_per_layer": [block.mixer.n_heads for block in blocks], "num_experts": moe.n_experts,
        "gating": "per-head" if per_head else "per-element", "moe_routed_scaling_factor": moe.routed_scale,
        "shared_expert_intermediate_size": moe.d_ff_shared, "rope_parameters": _positions(blocks),
    }


def _mimo_settings(config: LanguageModelConfig) -> Table:
    blocks, moe, found = _said(config)
    mixer = blocks[0].mixer
    return {
        **found, "num_key_value_heads": mixer.kv_heads // (1 if mixer.window is None else 2),
        "v_head_dim": mixer.v_dim or found["head_dim"], "attention_value_scale": mixer.value_scale,
        "rope_parameters": _positions(blocks), "n_routed_experts": moe.n_experts, "n_group": moe.n_groups,
        "topk_group": moe.top_k_groups, "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.routed_scale,
    }


def _flint_settings(config: LanguageModelConfig) -> Table:
    blocks, moe, found = _said(config)
    kinds = found.pop("mlp_layer_types")
    near = next(block.mixer for block in blocks if block.mixer.window is not None)
    return {
        **found, "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"], "decoder_sparse_step": 1,
        "num_experts": moe.n_experts, "norm_topk_prob": moe.normalize, "shared_expert_intermediate_size": moe.d_ff_shared,
        "rope_parameters": rope_settings(near.position.to_dict()),
    }


FAMILIES = (
    Family("laguna", "LagunaForCausalLM", _laguna, partial(_link, names=_LAGUNA), _laguna_settings),
    Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", _mimo, partial(_link, names=_MIMO), _mimo_settings),
    Family("flint", "FlintForCausalLM", _flint, partial(_link, names=_FLINT), _flint_settings),
)
