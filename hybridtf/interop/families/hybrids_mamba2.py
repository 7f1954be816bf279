"""Mamba-2 with attention and experts: Nemotron-H, Falcon-H1, Granite 4."""

from __future__ import annotations

import math
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.families.hybrids import kinds_of
from hybridtf.interop.families.scans import TRAINING
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
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
    parts.without_step_limit(settings)
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
    return parts.stack(settings, layers, norm)


def _link_nemotron(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="backbone", embedding="embeddings", norm="norm_f")
    for block, ours, theirs in parts.each_layer(links, config, {}, prefix="backbone.layers"):
        channel = f"{ours}.channel_mixer"
        links.same(f"{ours}.{'mixer' if block.channel_mixer is None else 'channel'}_norm", f"{theirs}.norm")
        if block.channel_mixer is None:
            link = parts.link_mamba2 if block.mixer.type == "mamba2" else parts.link_attention
            link(links, f"{ours}.mixer", f"{theirs}.mixer")
        elif links.has(f"{channel}.router"):
            links.named(channel, f"{theirs}.mixer", {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"})
            parts.link_channel(links, channel, f"{theirs}.mixer", block.channel_mixer, unit=WeightMap.same)
        else:
            links.same(channel, f"{theirs}.mixer")


def _kind_of(block: Any) -> str:
    if block.mixer is not None:
        return "linear_attention" if block.mixer.type == "mamba2" else "full_attention"
    return "moe" if hasattr(block.channel_mixer, "n_experts") else "mlp"


def _nemotron_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
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


# -- Falcon-H1: attention beside Mamba-2, with a number on everything --------------------------------------------------


def _falcon(settings: Settings) -> Table:
    norm = parts.norm(settings, default=1e-5)
    settings.only("hidden_act", "silu")
    settings.only("mamba_use_mlp", True)
    settings.passed_over("mlp_expansion_factor", "layers_block_type", "layer_types", "sliding_window", "attn_layer_indices")
    attention = {**heads(settings), "position": rope(settings), **parts.biased(settings)}
    if (keys := settings.number("key_multiplier", 1.0)) != 1.0:
        attention["scale"] = _width(attention, settings.count("hidden_size")) ** -0.5 * keys
    gate, down = settings.take("mlp_multipliers", [1.0, 1.0], kind=list)
    channel = parts.gated(settings, settings.count("intermediate_size"), bias=settings.flag("mlp_bias", False))
    mixer: Table = {"type": "parallel", "branches": [_falcon_mamba(settings, norm["eps"]), attention]}
    for name, site in (("in_scale", "in"), ("out_scale", "out")):
        scales = [settings.number(f"ssm_{site}_multiplier", 1.0), settings.number(f"attention_{site}_multiplier", 1.0)]
        mixer |= {name: scales} if scales != [1.0, 1.0] else {}
    block = {
        "mixer": mixer, "channel_mixer": channel if gate == 1.0 else {**channel, "gate_scale": gate}, "norm": norm,
        **({} if down == 1.0 else {"residual_scale": [1.0, down]}),
    }
    embedding, scores = settings.number("embedding_multiplier", 1.0), settings.number("lm_head_multiplier", 1.0)
    ends = parts.scaled(parts.ends(settings, tied=False), embedding, scores)
    return {**ends, "final_norm": norm, **stack_of([block] * settings.count("num_hidden_layers"))}


def _width(attention: Table, d_model: int) -> int:
    width: int = attention.get("head_dim") or d_model // attention["n_heads"]
    return width


def _falcon_mamba(settings: Settings, eps: float) -> Table:
    inner = settings.count("mamba_d_ssm", None if "mamba_d_ssm" in settings.values else 1024)
    mamba = parts.mamba2(settings, eps, inner)
    settings.only("projectors_bias", mamba["bias"])
    settings.passed_over("mamba_expand")
    first = settings.flag("mamba_norm_before_gate", True)
    if settings.flag("mamba_rms_norm", False):
        mamba |= {"norm_first": True} if first else {}
    else:
        mamba["norm"] = False
        del mamba["eps"]
    scales = settings.take("ssm_multipliers", [1.0] * 5, kind=list)
    return mamba if scales == [1.0] * 5 else {**mamba, "in_scale": scales}


def _link_falcon(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, norm="final_layernorm")
    for _, ours, theirs in parts.each_layer(links, config, ("input_layernorm", "pre_ff_layernorm")):
        parts.link_mamba2(links, f"{ours}.mixer.branch0", f"{theirs}.mamba")
        parts.link_attention(links, f"{ours}.mixer.branch1", f"{theirs}.self_attn")
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.feed_forward")


def _falcon_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    (mamba, attention), channel = block.mixer.branches, block.channel_mixer
    width = attention.head_dim or config.d_model // attention.n_heads
    keys = 1.0 if attention.scale is None else attention.scale * width**0.5
    ins, outs = ([1.0, 1.0] if scales is None else scales for scales in (block.mixer.in_scale, block.mixer.out_scale))
    found = parts.mamba2_settings(mamba, config.d_model)
    return {
        **parts.ends_settings(config), **found, "rms_norm_eps": block.norm.eps, "intermediate_size": channel.d_ff,
        "mlp_bias": channel.bias, "hidden_act": parts.activation_name(getattr(channel, "activation", "silu")),
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.n_kv_heads, "head_dim": width,
        "attention_bias": attention.qkv_bias, "rope_parameters": rope_settings(attention.position.to_dict()),
        "mamba_expand": 2, "mamba_d_ssm": found["mamba_n_heads"] * mamba.head_dim, "projectors_bias": mamba.bias,
        "mamba_rms_norm": mamba.norm, "mamba_norm_before_gate": mamba.norm_first,
        "ssm_multipliers": list(mamba.in_scale or [1.0] * 5), "ssm_in_multiplier": ins[0], "attention_in_multiplier": ins[1],
        "ssm_out_multiplier": outs[0], "attention_out_multiplier": outs[1],
        "mlp_multipliers": [getattr(channel, "gate_scale", 1.0), block.of_branch("residual_scale", "channel_mixer")],
        "key_multiplier": parts.undone(attention.scale or keys, keys, lambda x: width**-0.5 * x),
        **_multipliers(config, "lm_head_multiplier"),
    }


def _multipliers(config: LanguageModelConfig, name: str) -> Table:
    """Of the embedding and of the scores."""
    head: Any = config.head
    return {"embedding_multiplier": getattr(config.stem, "scale", 1.0), name: head.scale}


# -- Granite 4 ---------------------------------------------------------------------------------------------------------


def _granite(settings: Settings) -> Table:
    norm, n = parts.norm(settings), settings.count("num_hidden_layers")
    settings.only("hidden_act", "silu")
    settings.only("normalization_function", "rmsnorm")
    settings.passed_over("init_method")
    placed, position = settings.only("position_embedding_type", "nope", "rope"), rope(settings)
    attention = {**heads(settings), **parts.biased(settings), "position": position if placed == "rope" else {"type": "none"}}
    if (scale := settings.number("attention_multiplier", 1.0)) != _width(attention, settings.count("hidden_size")) ** -0.5:
        attention["scale"] = scale
    mamba, shared = parts.mamba2(settings, norm["eps"]), settings.count("shared_intermediate_size", 1024)
    channel = parts.gated(settings, shared)
    settings.passed_over("num_experts_per_tok", "intermediate_size")  # without experts
    if n_experts := settings.take("num_local_experts", 8, kind=int):
        channel = {
            "type": "moe", "scores": "softmax_top_k", "n_experts": n_experts, "top_k": settings.count("num_experts_per_tok", 2),
            "d_ff": settings.count("intermediate_size", 11008), "d_ff_shared": shared, "activation": parts.activation(settings),
        }
    added = settings.number("residual_multiplier", 1.0)
    rest = {"channel_mixer": channel, "norm": norm, **({} if added == 1.0 else {"residual_scale": added})}
    kinds = kinds_of(settings, ["linear_attention"] * n)
    layers = [{"mixer": attention if kind == "full_attention" else mamba, **rest} for kind in kinds]
    embedding, scores = settings.number("embedding_multiplier", 1.0), 1.0 / settings.number("logits_scaling", 1.0)
    return {**parts.scaled(parts.ends(settings, tied=False), embedding, scores), "final_norm": norm, **stack_of(layers)}


def _link_granite(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        channel, sparse = f"{ours}.channel_mixer", f"{theirs}.block_sparse_moe"
        parts.link_scan_or_attention(links, f"{ours}.mixer", theirs, block.mixer)
        dense = channel
        if links.has(f"{channel}.router"):
            dense = f"{channel}.shared"
            links.same(f"{channel}.router", f"{sparse}.router.layer")
            both = [f"{sparse}.{name}.weight" for name in ("input_linear", "output_linear")]
            parts.link_fused_experts(links, f"{channel}.experts", *both)
        parts.link_fused_gated(links, dense, f"{theirs}.shared_mlp", "input_linear", "output_linear")


def _granite_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    kinds = ["linear_attention" if block.mixer.type == "mamba2" else "full_attention" for block in blocks]
    mamba = next((block.mixer for block in blocks if block.mixer.type == "mamba2"), None)
    attention = next((block.mixer for block in blocks if block.mixer.type != "mamba2"), None)
    channel, head = blocks[0].channel_mixer, config.head
    sparse = hasattr(channel, "n_experts")
    scores = getattr(head, "scale", 1.0)
    found = {
        **parts.ends_settings(config), "rms_norm_eps": blocks[0].norm.eps, "layer_types": kinds,
        "hidden_act": parts.activation_name(getattr(channel, "activation", "silu")), "intermediate_size": channel.d_ff,
        "shared_intermediate_size": channel.d_ff_shared if sparse else channel.d_ff, "num_local_experts": 0,
        "residual_multiplier": blocks[0].of_branch("residual_scale", "mixer"), **_multipliers(config, "logits_scaling"),
        "logits_scaling": parts.undone(scores, 1.0 / scores, lambda x: 1.0 / x),
    }
    if sparse:
        found |= {"num_local_experts": channel.n_experts, "num_experts_per_tok": channel.top_k}
    # What is in no layer has to fit the width all the same.
    found |= {"mamba_n_heads": 1} if mamba is None else parts.mamba2_settings(mamba, config.d_model)
    return {**found, **({"num_attention_heads": 1} if attention is None else _granite_attention(attention, config.d_model))}


def _granite_attention(attention: Any, d_model: int) -> Table:
    width = attention.head_dim or d_model // attention.n_heads
    found = {
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.n_kv_heads, "head_dim": width,
        "attention_bias": attention.qkv_bias, "attention_multiplier": attention.scale or width**-0.5,
    }
    position = attention.position.to_dict()
    if position["type"] == "none":
        return found
    return {**found, "position_embedding_type": "rope", "rope_parameters": rope_settings(position)}


FAMILIES = (
    Family("nemotron_h", "NemotronHForCausalLM", _nemotron, _link_nemotron, _nemotron_settings),
    Family("falcon_h1", "FalconH1ForCausalLM", _falcon, _link_falcon, _falcon_settings),
    Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _granite, _link_granite, _granite_settings),
)
