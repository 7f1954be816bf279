"""LFM2, dense and with experts, and LFM3: double-gated short convolutions beside attention with normed queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

GATES = ("w1", "w3", "w2")
DRAWN = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
"""How weights were drawn."""


def _convolution(settings: Settings, taps: int) -> Table:
    table: Table = {"type": "gated_short_conv", "d_conv": settings.count("conv_L_cache", taps)}
    return {**table, "bias": True} if settings.flag("conv_bias", False) else table


def _stack(settings: Settings, kinds: list[str], channel: Callable[[int], Table]) -> Table:
    norm = parts.norm(settings, "norm_eps", 1e-5)
    mixers = {
        "full_attention": {**heads(settings), "position": rope(settings, theta=1e6), "qk_norm": norm},
        "conv": _convolution(settings, 3),
    }
    layers = [{"mixer": mixers[kind], "channel_mixer": channel(i), "norm": norm} for i, kind in enumerate(kinds)]
    return {**_ends(settings), "final_norm": norm, **stack_of(layers)}


def _ends(settings: Settings) -> Table:
    ends = parts.ends(settings, tied=True)
    ends["head"]["tied"] = settings.flag("tie_embedding", ends["head"]["tied"])
    return ends


def _lfm2(settings: Settings) -> Table:
    """Published settings say some things twice: by names of their own first."""
    n, d_model = settings.count("num_hidden_layers"), settings.count("hidden_size")
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        settings.only(name, d_model)
    settings.only("num_heads", settings.count("num_attention_heads"))
    settings.only("block_norm_eps", settings.number("norm_eps", 1e-5))
    settings.only("block_use_swiglu", True)
    settings.only("use_pos_enc", True)
    settings.passed_over(*DRAWN)
    attend = settings.take("full_attn_idxs", list(range(n)), kind=list)
    default = ["full_attention" if i in attend else "conv" for i in range(n)]
    d_ff = settings.count("block_ff_dim", settings.count("intermediate_size", 12288))
    factor, multiple = settings.number("block_ffn_dim_multiplier", 1.0), settings.count("block_multiple_of", 256)
    if settings.flag("block_auto_adjust_ff_dim", True):
        d_ff = int(2 * d_ff / 3)
        if settings.values.get("block_ffn_dim_multiplier", 1.0) is not None:  # null leaves the rounding out as well
            d_ff = -(-int(factor * d_ff) // multiple) * multiple
    kinds = parts.kinds(settings, ("full_attention", "conv"), default)
    return _stack(settings, kinds, lambda i: {"type": "swiglu", "d_ff": d_ff})


def _lfm2_moe(settings: Settings) -> Table:
    n_dense = settings.take("num_dense_layers", 2, kind=int)
    dense = {"type": "swiglu", "d_ff": settings.count("intermediate_size", 7168)}
    sparse = {
        "type": "moe", "scores": "sigmoid", "norm_eps": 1e-6, "n_experts": settings.count("num_experts", 32),
        "top_k": settings.count("num_experts_per_tok", 4), "d_ff": settings.count("moe_intermediate_size", 1792),
        "normalize": settings.flag("norm_topk_prob", True), "routed_scale": settings.number("routed_scaling_factor", 1.0),
        "selection_bias": "fixed" if settings.flag("use_expert_bias", True) else "none",
    }
    settings.passed_over("full_attn_idxs")  # told by layer_types
    return _stack(settings, parts.kinds(settings, ("full_attention", "conv")), lambda i: dense if i < n_dense else sparse)


def _lfm3(settings: Settings) -> Table:
    norm, n = parts.norm(settings, "norm_eps", 1e-5), settings.count("num_hidden_layers")
    default = ["full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 < i else "conv" for i in range(n)]
    bias = parts.biased(settings)
    gate = {"output_gate": True, "output_gate_per": "head"} if settings.flag("use_attention_gate", True) else {}
    attention = {**heads(settings), "head_dim": settings.count("head_dim", 128), **bias, **gate, "qk_norm": norm}
    half = {"type": "proportional", "factor": 1.0, "turning": 0.5}
    local, whole = {"type": "rope"}, {"type": "rope", "theta": 1e6, "scaling": half}
    if "rope_parameters" in settings:
        local, whole = (rope(settings, theta=1e6, kind=kind) for kind in ("sliding_attention", "full_attention"))
    mixers = {
        "conv": _convolution(settings, 7), "full_attention": {**attention, "position": whole},
        "sliding_attention": {**attention, "position": local, "window": settings.count("sliding_window", 256)},
    }
    wiring = {"type": "sandwich"} if settings.flag("use_sandwich_norm", True) else {}
    channel = {"type": "swiglu", "d_ff": settings.count("intermediate_size", 7680)}
    layers = [
        {**wiring, "mixer": mixers[kind], "channel_mixer": channel, "norm": norm}
        for kind in parts.kinds(settings, tuple(mixers), default)
    ]
    return {**_ends(settings), "final_norm": norm, **stack_of(layers)}


# -- weights -----------------------------------------------------------------------------------------------------------


LFM2_NAMES = {"out_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}


def _link(links: WeightMap, config: LanguageModelConfig, names: dict[str, str]) -> None:
    """``names``: parts of attention, ours and theirs."""
    parts.link_ends(links, config, norm="embedding_norm")
    norms = {
        "mixer_norm": "operator_norm", "channel_norm": "ffn_norm", "mixer_post_norm": "post_operator_norm",
        "channel_post_norm": "post_ffn_norm",
    }
    for block, ours, theirs in parts.each_layer(links, config, norms):
        if block.mixer.type == "gated_short_conv":
            links.named(f"{ours}.mixer", f"{theirs}.conv", ("in_proj", "out_proj"))
            links.convolution(f"{ours}.mixer.conv", f"{theirs}.conv.conv")
        else:
            parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", **names)
        parts.link_channel(
            links, f"{ours}.channel_mixer", f"{theirs}.feed_forward", block.channel_mixer, gates=GATES, bias="expert_bias",
            unit=partial(parts.link_gated, gate=GATES[0], up=GATES[1], down=GATES[2]),
        )


# -- back --------------------------------------------------------------------------------------------------------------


def _common(config: LanguageModelConfig) -> tuple[Table, list[Any]]:
    """What all say alike, and the blocks."""
    blocks = parts.blocks_of(config)
    convolution = next((block.mixer for block in blocks if block.mixer.type == "gated_short_conv"), None)
    attention = next((block.mixer for block in blocks if block.mixer.type != "gated_short_conv"), None)
    kinds = [_kind_of(block.mixer) for block in blocks]
    found = {**parts.ends_settings(config), "layer_types": kinds, "norm_eps": blocks[0].norm.eps}
    if convolution is not None:
        found |= {"conv_L_cache": convolution.d_conv, "conv_bias": convolution.bias}
    if attention is None:
        return {**found, "num_attention_heads": 1, "num_key_value_heads": 1}, blocks
    return {
        **found, "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.n_kv_heads,
        **({} if attention.head_dim is None else {"head_dim": attention.head_dim}),
        "rope_parameters": rope_settings(attention.position.to_dict()),
    }, blocks


def _kind_of(mixer: Any) -> str:
    if mixer.type == "gated_short_conv":
        return "conv"
    return "full_attention" if mixer.window is None else "sliding_attention"


def _lfm3_settings(config: LanguageModelConfig) -> Table:
    found, blocks = _common(config)
    first = {kind: blocks[found["layer_types"].index(kind)].mixer for kind in found["layer_types"]}
    attention = {kind: mixer for kind, mixer in first.items() if kind != "conv"}
    found |= {
        "rope_parameters": {kind: rope_settings(mixer.position.to_dict()) for kind, mixer in attention.items()},
        "intermediate_size": blocks[0].channel_mixer.d_ff, "use_sandwich_norm": blocks[0].type == "sandwich",
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,  # those assumed without are beyond small vocabularies
    }
    if "sliding_attention" in first:
        found["sliding_window"] = first["sliding_attention"].window
    for mixer in attention.values():
        width = mixer.head_dim or config.d_model // mixer.n_heads
        found |= {"head_dim": width, "attention_bias": mixer.qkv_bias, "use_attention_gate": mixer.output_gate}
    return found


def _lfm2_settings(config: LanguageModelConfig) -> Table:
    found, blocks = _common(config)
    return {**found, "intermediate_size": blocks[0].channel_mixer.d_ff, "block_auto_adjust_ff_dim": False}


def _lfm2_moe_settings(config: LanguageModelConfig) -> Table:
    found, blocks = _common(config)
    dense = [block.channel_mixer for block in blocks if not hasattr(block.channel_mixer, "n_experts")]
    moe = next(block.channel_mixer for block in blocks if hasattr(block.channel_mixer, "n_experts"))
    found |= {"intermediate_size": dense[0].d_ff} if dense else {}
    return {
        **found, "num_dense_layers": len(dense), "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff, "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.routed_scale,
        "use_expert_bias": moe.selection_bias != "none",
    }


FAMILIES = (
    Family("lfm2", "Lfm2ForCausalLM", _lfm2, partial(_link, names=LFM2_NAMES), _lfm2_settings),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2_moe, partial(_link, names=LFM2_NAMES), _lfm2_moe_settings),
    Family("lfm3", "Lfm3ForCausalLM", _lfm3, partial(_link, names={"gate_proj": "gate_proj"}), _lfm3_settings),
)
