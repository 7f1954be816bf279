"""Mamba-2 with attention and experts: Nemotron-H."""

from __future__ import annotations

import math
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.scans import TRAINING
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

# -- Nemotron-H: layers of one branch ----------------------------------------------------------------------------------

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _nemotron_kinds(settings: Settings) -> list[str]:
    """The kind of each layer, which the published configs say by letters."""
    letters = settings.take("hybrid_override_pattern", "ME*-", kind=str)
    said = settings.take("layers_block_type", settings.take("layer_types", list(letters), kind=list), kind=list)
    kinds = [_LETTERS.get(kind, _OLDER.get(kind, kind)) for kind in said]
    settings.passed_over("num_hidden_layers")
    unknown = sorted({str(kind) for kind in kinds} - set(_LETTERS.values()))
    if unknown or not kinds:
        known = ", ".join(_LETTERS.values())
        raise CheckpointError(f"{settings.where}: layers_block_type has {', '.join(unknown) or 'no layers'}; known: {known}")
    return kinds


def _nemotron_mamba(settings: Settings) -> Table:
    """``time_step_limit`` is not what transformers clamps by: a step is at least ``time_step_min``."""
    settings.only("mamba_hidden_act", "silu")
    limit = settings.take("time_step_limit", None)
    if parts.step_limit(settings):
        raise CheckpointError(f"{settings.where}: time_step_limit is {limit}; known here: [0, Infinity]")
    settings.passed_over(
        "mamba_ssm_cache_dtype", "mamba_proj_bias", "residual_in_fp32", "expand", "chunk_size", "mamba_dt_max", *TRAINING,
    )
    least = settings.number("time_step_min", settings.number("mamba_dt_min", 1e-3))
    table = {
        "type": "mamba2", "d_state": settings.count("ssm_state_size", 128), "n_heads": settings.count("mamba_num_heads", 128),
        "head_dim": settings.count("mamba_head_dim", 64),
        "n_groups": settings.count("n_groups", settings.count("mamba_n_groups", 8)),
        "d_conv": settings.count("conv_kernel", settings.count("mamba_d_conv", 4)), "bias": settings.flag("use_bias", False),
        "conv_bias": settings.flag("use_conv_bias", settings.flag("mamba_conv_bias", True)),
        "eps": settings.number("layer_norm_epsilon", 1e-5),
    }
    return {**table, **parts.steps_between(least, math.inf)}


def _nemotron_experts(settings: Settings) -> Table:
    settings.passed_over("n_shared_experts", "moe_shared_expert_overlap")
    bias, latent = settings.flag("mlp_bias", False), settings.count("moe_latent_size", 0)
    table = {
        "type": "moe", "n_experts": settings.count("n_routed_experts", settings.count("num_local_experts", 8)),
        "top_k": settings.count("num_experts_per_tok", 2), "d_ff": settings.count("moe_intermediate_size", 7688),
        "d_ff_shared": settings.count("moe_shared_expert_intermediate_size", 7688),
        "scores": "sigmoid", "selection_bias": "fixed", "group_score": "top2", "n_groups": settings.count("n_group", 1),
        "top_k_groups": settings.count("topk_group", 1), "normalize": settings.flag("norm_topk_prob", True), "gated": False,
        "routed_scale": settings.number("routed_scaling_factor", 1.0),
        "activation": parts.activation(settings, "mlp_hidden_act", "relu2"),
    }
    more = {**({"d_latent": latent} if latent else {}), **({"outer_bias": True} if bias else {})}
    return {**table, **more}


def _nemotron(settings: Settings) -> Table:
    settings.only("num_nextn_predict_layers", 0)
    settings.passed_over(
        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "hidden_dropout", "sliding_window", "attention_bias",
        "rope_theta", "partial_rotary_factor", "rms_norm_eps", "norm_eps",
    )
    norm = parts.norm(settings, "layer_norm_epsilon", 1e-5)
    n_heads = settings.count("num_attention_heads", 32)
    width = settings.count("head_dim", settings.count("attention_head_dim", 128))
    attention = {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", n_heads),
        "head_dim": width, "position": {"type": "none"},
    }
    mlp = {
        "type": "mlp", "d_ff": settings.count("intermediate_size", 21504), "bias": settings.flag("mlp_bias", False),
        "activation": parts.activation(settings, "mlp_hidden_act", "relu2"),
    }
    branch = {
        "linear_attention": {"mixer": _nemotron_mamba(settings)}, "full_attention": {"mixer": attention},
        "mlp": {"channel_mixer": mlp}, "moe": {"channel_mixer": _nemotron_experts(settings)},
    }
    layers = [{**branch[kind], "norm": norm} for kind in _nemotron_kinds(settings)]
    return {**parts.ends(settings, tied=False), "final_norm": norm, **stack_of(layers)}


def _link_nemotron(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="backbone", embedding="embeddings", norm="norm_f")
    for i, name in enumerate(config.layers()):
        block: Any = config.blocks[name]
        ours, theirs = f"stack.layers.{i}", f"backbone.layers.{i}"
        channel = f"{ours}.channel_mixer"
        links.same(f"{ours}.{'mixer' if block.channel_mixer is None else 'channel'}_norm", f"{theirs}.norm")
        if block.channel_mixer is None:
            link = parts.link_mamba2 if block.mixer.type == "mamba2" else parts.link_attention
            link(links, f"{ours}.mixer", f"{theirs}.mixer")
        elif links.has(f"{channel}.router"):
            links.same(f"{channel}.router", f"{theirs}.mixer.gate")
            links.same(f"{channel}.selection.bias", f"{theirs}.mixer.gate.e_score_correction_bias")
            links.same(f"{channel}.shared", f"{theirs}.mixer.shared_experts")
            links.same(f"{channel}.latent_in", f"{theirs}.mixer.fc1_latent_proj")
            links.same(f"{channel}.latent_out", f"{theirs}.mixer.fc2_latent_proj")
            parts.link_experts(links, f"{channel}.experts", f"{theirs}.mixer.experts", block.channel_mixer.n_experts)
        else:
            links.same(channel, f"{theirs}.mixer")


def _kind_of(block: Any) -> str:
    if block.mixer is not None:
        return "linear_attention" if block.mixer.type == "mamba2" else "full_attention"
    return "moe" if hasattr(block.channel_mixer, "n_experts") else "mlp"


def _nemotron_settings(config: LanguageModelConfig) -> Table:
    blocks: list[Any] = [config.blocks[name] for name in config.layers()]
    kinds = [_kind_of(block) for block in blocks]
    first = {kind: blocks[kinds.index(kind)] for kind in kinds}
    found = {
        **parts.ends_settings(config), "layers_block_type": kinds, "layer_norm_epsilon": blocks[0].norm.eps,
        "mamba_hidden_act": "silu",
    }
    del found["num_hidden_layers"]
    if "full_attention" in first:
        mixer = first["full_attention"].mixer
        width = mixer.head_dim or config.d_model // mixer.n_heads
        found |= {"num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.n_kv_heads, "head_dim": width}
    if "linear_attention" in first:
        found |= _nemotron_mamba_settings(first["linear_attention"].mixer, config.d_model)
    if "mlp" in first:
        mlp = first["mlp"].channel_mixer
        found |= {"intermediate_size": mlp.d_ff, "mlp_bias": mlp.bias, "mlp_hidden_act": parts.activation_name(mlp.activation)}
    return {**found, **_nemotron_expert_settings(first["moe"].channel_mixer)} if "moe" in first else found


def _nemotron_mamba_settings(mamba: Any, d_model: int) -> Table:
    return {
        "ssm_state_size": mamba.d_state,
        "mamba_num_heads": mamba.n_heads or round(mamba.expand * d_model) // mamba.head_dim,
        "mamba_head_dim": mamba.head_dim, "n_groups": mamba.n_groups, "conv_kernel": mamba.d_conv, "use_bias": mamba.bias,
        "use_conv_bias": mamba.conv_bias, "chunk_size": 128, "time_step_min": parts.limit_settings(mamba.dt_limit)[0],
    }


def _nemotron_expert_settings(moe: Any) -> Table:
    return {
        "n_routed_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "moe_shared_expert_intermediate_size": moe.d_ff_shared, "n_group": moe.n_groups, "topk_group": moe.top_k_groups,
        "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.routed_scale, "moe_latent_size": moe.d_latent or None,
        "mlp_bias": bool(moe.outer_bias), "mlp_hidden_act": parts.activation_name(moe.activation),
    }


FAMILIES = (Family("nemotron_h", "NemotronHForCausalLM", _nemotron, _link_nemotron, _nemotron_settings),)
