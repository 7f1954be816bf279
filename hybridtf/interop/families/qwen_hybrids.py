"""Gated DeltaNet with attention, as Qwen wires them: Qwen3-Next, the text models of Qwen3.5, and Lara Mini."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hybridtf.interop.families import memories, parts
from hybridtf.interop.families.memories import FULL, LINEAR
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

SLIDING = "sliding_attention"
DT_START = [1.3133, 1.3133]
"""These families start ``dt_bias`` at 1."""


def _memory(settings: Settings, eps: float, *, keys: int = 16, values: int = 32) -> Table:
    settings.only("hidden_act", "silu")
    return {**memories.gated_delta_net(settings, keys, values, 128, 128, eps), "dt_range": DT_START}


def _heads(settings: Settings, n_heads: int, n_kv_heads: int, head_dim: int) -> Table:
    return {
        "n_heads": settings.count("num_attention_heads", n_heads),
        "n_kv_heads": settings.count("num_key_value_heads", n_kv_heads), "head_dim": settings.count("head_dim", head_dim),
    }


def _moe(settings: Settings, *, normalize: bool, top_k: int, n_experts: int, gate: bool = True) -> Table:
    table: Table = {
        "type": "moe", "n_experts": settings.count("num_experts", n_experts),
        "top_k": settings.count("num_experts_per_tok", top_k), "d_ff": settings.count("moe_intermediate_size", 512),
        "normalize": normalize, "d_ff_shared": settings.count("shared_expert_intermediate_size", 512),
    }
    return {**table, "shared_gate": True} if gate else table


# -- Qwen3-Next and Qwen3.5 --------------------------------------------------------------------------------------------


def _qwen(settings: Settings, channel: Callable[[Settings, int], Table], n_kv_heads: int) -> Table:
    norm = {**parts.norm(settings), "unit_offset": True}
    n, period = settings.count("num_hidden_layers"), settings.count("full_attention_interval", 4)
    kinds = parts.kinds(settings, (LINEAR, FULL), memories.every_other(n, period))
    settings.only("use_sliding_window", False)
    settings.passed_over("sliding_window", "max_window_layers")
    memory = _memory(settings, norm["eps"])
    attention: Table = {
        "type": "gated_attention", **_heads(settings, 16, n_kv_heads, 256), "qk_norm": norm,
        "position": rope(settings, fraction=0.25, sections=True),
    }
    if settings.flag("attention_bias", False):
        attention["bias"] = True
    layers = [
        {"mixer": attention if kind == FULL else memory, "channel_mixer": channel(settings, i), "norm": norm}
        for i, kind in enumerate(kinds)
    ]
    return parts.stack(settings, layers, norm)


def _qwen3_next_channel(settings: Settings, layer: int) -> Table:
    step, dense = settings.count("decoder_sparse_step", 1), settings.take("mlp_only_layers", [], kind=list)
    d_ff, n_experts = settings.count("intermediate_size", 5632), settings.take("num_experts", 512, kind=int)
    normalize = settings.flag("norm_topk_prob", True)
    if layer not in dense and (layer + 1) % step == 0 and n_experts > 0:
        return _moe(settings, normalize=normalize, top_k=10, n_experts=512)
    settings.passed_over("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return parts.gated(settings, d_ff)


def _qwen3_5_channel(settings: Settings, layer: int) -> Table:
    return parts.gated(settings, settings.count("intermediate_size", 12288))


def _qwen3_5_moe_channel(settings: Settings, layer: int) -> Table:
    settings.only("norm_topk_prob", True)
    return _moe(settings, normalize=True, top_k=8, n_experts=256)


def _link_attention(links: WeightMap, ours: str, theirs: str, n_heads: int) -> None:
    """Their queries and gates go through the heads in turn; ours are all queries, then all gates."""

    def read(x: Tensor) -> Tensor:
        both: Tensor = x.unflatten(0, (n_heads, 2, -1))
        return both.transpose(0, 1).flatten(0, 2)

    def write(x: Tensor) -> Tensor:
        both: Tensor = x.unflatten(0, (2, n_heads, -1))
        return both.transpose(0, 1).flatten(0, 2)

    for rest in ("weight", "bias"):
        if links.has(f"{ours}.q_proj.{rest}"):
            links.turned(f"{ours}.q_proj.{rest}", f"{theirs}.q_proj.{rest}", read, write)
    parts.link_attention(links, ours, theirs, q_proj=None)


def _link_memory(links: WeightMap, ours: str, theirs: str, norm: str = "norm") -> None:
    """All of a memory but its projections from the stream."""
    links.named(ours, theirs, {"A_log": "A_log", "dt_bias": "dt_bias", "norm": norm, "out_proj": "out_proj"})
    memories.link_convolutions(links, ours, f"{theirs}.conv1d")


def _link_qwen(links: WeightMap, config: LanguageModelConfig, *, by_heads: bool) -> None:
    """``by_heads``: their projections of a memory go through the key heads in turn (Qwen3-Next)."""
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer, shared="shared_expert")
        if block.mixer.type == "gated_attention":
            _link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", block.mixer.n_heads)
            continue
        at, there = f"{ours}.mixer", f"{theirs}.linear_attn"
        _link_memory(links, at, there)
        q, k, v, gate, b, a = (f"{at}.{role}_proj" for role in ("q", "k", "v", "gate", "b", "a"))
        if by_heads:
            parts.link_grouped(links, [q, k, v, gate], f"{there}.in_proj_qkvz", block.mixer.n_heads)
            parts.link_grouped(links, [b, a], f"{there}.in_proj_ba", block.mixer.n_heads)
            continue
        links.fused([q, k, v], f"{there}.in_proj_qkv")
        for one, other in ((gate, "z"), (b, "b"), (a, "a")):
            links.same(one, f"{there}.in_proj_{other}")


def _shared_settings(config: LanguageModelConfig, attention: Any) -> Table:
    """What all families here say alike."""
    blocks = parts.blocks_of(config)
    memory = parts.first_of(blocks, "gated_delta_net")
    return {
        **parts.ends_settings(config), **memories.gated_delta_net_settings(memory, config.d_model), "hidden_act": "silu",
        "rms_norm_eps": blocks[0].norm.eps, "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim or config.d_model // attention.n_heads,
        "layer_types": [LINEAR if b.mixer.type == "gated_delta_net" else FULL for b in blocks],
    }


def _moe_settings(moe: Any) -> Table:
    return {
        "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "shared_expert_intermediate_size": moe.d_ff_shared,
    }


def _qwen_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    attention = parts.first_of(blocks, "gated_attention")
    position = rope_settings(attention.position.to_dict())
    found = {
        **_shared_settings(config, attention), "attention_bias": attention.bias,
        "rope_parameters": {"partial_rotary_factor": 1.0, **position},
    }
    dense = [i for i, b in enumerate(blocks) if not hasattr(b.channel_mixer, "n_experts")]
    if dense:
        found["intermediate_size"] = blocks[dense[0]].channel_mixer.d_ff
    if len(dense) < len(blocks):
        found |= _moe_settings(next(b.channel_mixer for b in blocks if hasattr(b.channel_mixer, "n_experts")))
    return found


def _qwen3_next_settings(config: LanguageModelConfig) -> Table:
    found = _qwen_settings(config)
    channels: list[Any] = [getattr(config.blocks[name], "channel_mixer") for name in config.layers()]  # noqa: B009
    dense = [i for i, channel in enumerate(channels) if not hasattr(channel, "n_experts")]
    moe = next((channel for channel in channels if hasattr(channel, "n_experts")), None)
    return {
        **found, "mlp_only_layers": dense, "decoder_sparse_step": 1, "norm_topk_prob": True if moe is None else moe.normalize,
    }


# -- Lara Mini ---------------------------------------------------------------------------------------------------------


def _lara(settings: Settings) -> Table:
    norm, n = parts.norm(settings), settings.count("num_hidden_layers")
    period = [LINEAR, SLIDING, LINEAR, FULL, SLIDING]
    kinds = parts.kinds(settings, (LINEAR, SLIDING, FULL), [period[i % 5] for i in range(n)])
    attention: Table = {"type": "attention", **_heads(settings, 16, 4, 128), "qk_norm": norm, "position": {"type": "none"}}
    attention |= parts.biased(settings)
    mixers = {
        FULL: attention, LINEAR: _memory(settings, norm["eps"], keys=8, values=16),
        SLIDING: {**attention, "position": rope(settings), "window": settings.count("sliding_window", 512)},
    }
    channel = _moe(settings, normalize=settings.flag("norm_topk_prob", True), top_k=4, n_experts=128, gate=False)
    layers = [{"mixer": mixers[kind], "channel_mixer": channel, "norm": norm} for kind in kinds]
    return parts.stack(settings, layers, norm, tied=True)


def _link_lara(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        channel, mlp = f"{ours}.channel_mixer", f"{theirs}.mlp"
        parts.link_channel(links, channel, mlp, block.channel_mixer, fused=True, shared="shared_expert")
        if block.mixer.type == "attention":
            parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
            continue
        _link_memory(links, f"{ours}.mixer", f"{theirs}.linear_attn", "out_norm")
        roles = [f"{ours}.mixer.{role}_proj" for role in ("q", "k", "v", "gate", "b", "a")]
        links.fused(roles, f"{theirs}.linear_attn.in_proj")


def _lara_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    attention = [b.mixer for b in blocks if b.mixer.type == "attention"]
    sliding = next((one for one in attention if one.window), None)
    found = {**_shared_settings(config, attention[0]), **_moe_settings(blocks[0].channel_mixer)}
    found |= {"attention_bias": attention[0].qkv_bias, "norm_topk_prob": blocks[0].channel_mixer.normalize}
    kinds = zip(found["layer_types"], blocks, strict=True)
    found["layer_types"] = [SLIDING if kind == FULL and b.mixer.window else kind for kind, b in kinds]
    if sliding is not None:
        found |= {"sliding_window": sliding.window, "rope_parameters": rope_settings(sliding.position.to_dict())}
    return found


FAMILIES = (
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", lambda s: _qwen(s, _qwen3_next_channel, 2), partial(_link_qwen, by_heads=True),
        _qwen3_next_settings,
    ),
    Family(
        "qwen3_5_text", "Qwen3_5ForCausalLM", lambda s: _qwen(s, _qwen3_5_channel, 4), partial(_link_qwen, by_heads=False),
        _qwen_settings,
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", lambda s: _qwen(s, _qwen3_5_moe_channel, 2),
        partial(_link_qwen, by_heads=False), _qwen_settings,
    ),
    Family("lara_mini", "LaraMiniForCausalLM", _lara, _link_lara, _lara_settings),
)
