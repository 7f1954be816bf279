"""Pre-norm stacks of attention: Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen3-MoE, OLMoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

Mixer = Callable[[Settings, Table, int], Table]
"""``(settings, attention, layer)``: what a family adds to the attention of a layer."""


def heads(settings: Settings, *, width: int = 0) -> Table:
    """Attention of grouped heads, as most families say it. ``width``: a head's where the settings do not say; 0: its share."""
    n_heads = settings.count("num_attention_heads")
    table = {"type": "attention", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", n_heads)}
    width = settings.count("head_dim", width)
    return {**table, "head_dim": width} if width and width * n_heads != settings.count("hidden_size") else table


def window(settings: Settings, layer: int, *, used: bool = True) -> Table:
    """The window of a layer, by its kind in ``layer_types`` or for all layers alike."""
    kinds = settings.take("layer_types", None, kind=list)
    size = settings.take("sliding_window", None, kind=int)
    if kinds is None:
        return {"window": size} if size is not None and used else {}
    if len(kinds) != (n := settings.count("num_hidden_layers")):
        raise CheckpointError(f"{settings.where}: layer_types has {len(kinds)} entries for {n} layers")
    kind = kinds[layer]
    if kind not in ("full_attention", "sliding_attention"):
        raise CheckpointError(
            f"{settings.where}: layer_types[{layer}] is {kind!r}; known here: full_attention, sliding_attention"
        )
    if kind == "sliding_attention" and size is None:
        raise CheckpointError(f"{settings.where}: layer_types[{layer}] is sliding_attention, and sliding_window is missing")
    return {"window": size} if kind == "sliding_attention" else {}


def prenorm(
    settings: Settings, mixer: Mixer, channel: Callable[[Settings, int], Table], *, theta: float = 10000.0
) -> Table:
    """A pre-norm stack of rotary attention."""
    norm, position = parts.norm(settings), rope(settings, theta=theta)
    layers = [
        {
            "mixer": mixer(settings, {**heads(settings), "position": position}, i), "channel_mixer": channel(settings, i),
            "norm": norm,
        }
        for i in range(settings.count("num_hidden_layers"))
    ]
    return parts.stack(settings, layers, norm)


def _biased(settings: Settings, attention: Table, layer: int) -> Table:
    return {**attention, **parts.biased(settings)}


def _windowed(settings: Settings, attention: Table, layer: int) -> Table:
    return {**attention, **window(settings, layer)}


def _alike(settings: Settings, attention: Table, used: bool = True) -> Table:
    """One window for all layers, as in families that do not look at ``layer_types``."""
    kinds = settings.take("layer_types", [], kind=list)
    if len(set(kinds)) > 1:
        raise CheckpointError(f"{settings.where}: layer_types has several kinds, and all layers of this family are alike")
    size = settings.take("sliding_window", None, kind=int)
    return {**attention, "window": size} if size is not None and used else attention


def _qwen2(settings: Settings, attention: Table, layer: int) -> Table:
    return {**attention, "qkv_bias": True, **_qwen_window(settings, layer)}


def _qwen3(settings: Settings, attention: Table, layer: int) -> Table:
    return {**attention, **parts.biased(settings), "qk_norm": parts.norm(settings), **_qwen_window(settings, layer)}


def _qwen_window(settings: Settings, layer: int) -> Table:
    """From ``max_window_layers`` on where ``layer_types`` does not say, and only where windows are used."""
    used, from_layer = settings.flag("use_sliding_window", False), settings.take("max_window_layers", 28, kind=int)
    found = window(settings, layer, used=used and layer >= from_layer)
    if found and not used:
        raise CheckpointError(f"{settings.where}: layer_types[{layer}] is sliding_attention, and use_sliding_window is false")
    return found


def _qwen3_alike(settings: Settings, attention: Table, layer: int) -> Table:
    settings.passed_over("max_window_layers")
    normed = {**attention, **parts.biased(settings), "qk_norm": parts.norm(settings)}
    return _alike(settings, normed, settings.flag("use_sliding_window", False))


def _dense(settings: Settings, layer: int) -> Table:
    return parts.gated(settings, settings.count("intermediate_size"), bias=settings.flag("mlp_bias", False))


def _mixtral(settings: Settings, layer: int) -> Table:
    settings.only("hidden_act", "silu")
    return {
        "type": "moe", "scores": "softmax_top_k", "n_experts": settings.count("num_local_experts"),
        "top_k": settings.count("num_experts_per_tok"), "d_ff": settings.count("intermediate_size"),
    }


def _qwen3_moe(settings: Settings, layer: int) -> Table:
    settings.only("hidden_act", "silu")
    step, dense = settings.count("decoder_sparse_step", 1), settings.take("mlp_only_layers", [], kind=list)
    if layer in dense or (layer + 1) % step:
        return parts.gated(settings, settings.count("intermediate_size"))
    settings.passed_over("intermediate_size")
    return {
        "type": "moe", "n_experts": settings.count("num_experts", settings.count("num_local_experts", None)),
        "top_k": settings.count("num_experts_per_tok"),
        "d_ff": settings.count("moe_intermediate_size"), "normalize": settings.flag("norm_topk_prob", False),
    }


# -- weights -----------------------------------------------------------------------------------------------------------


def link(
    links: WeightMap, config: LanguageModelConfig, *, experts: str = "mlp", gates: tuple[str, str, str] = parts.GATED,
    norms: Mapping[str, str] = parts.PRENORM, attention: Mapping[str, str | None] | None = None,
) -> None:
    """The names of Llama; experts stand below ``experts``, and their matrices are called ``gates``; ``norms``: theirs of ours;
    ``attention``: as the names of :func:`parts.link_attention`."""
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config, norms):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", **(attention or {}))
        if not links.has(f"{ours}.channel_mixer.router"):
            parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")
            continue
        links.same(f"{ours}.channel_mixer.router", f"{theirs}.{experts}.gate")
        n = block.channel_mixer.n_experts
        parts.link_experts(links, f"{ours}.channel_mixer.experts", f"{theirs}.{experts}.experts", n, *gates)


# -- back --------------------------------------------------------------------------------------------------------------


def settings_of(config: LanguageModelConfig) -> dict[str, Any]:
    """What all of these families say alike, of the first layer; an export checks the others."""
    blocks = parts.blocks_of(config)
    mixer, channel = blocks[0].mixer, next((b.channel_mixer for b in blocks if not hasattr(b.channel_mixer, "n_experts")), None)
    rotary = next((b.mixer.position for b in blocks if b.mixer.position.type == "rope"), mixer.position)
    found = {
        **parts.ends_settings(config), "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.n_kv_heads,
        "head_dim": mixer.head_dim or config.d_model // mixer.n_heads, "rms_norm_eps": blocks[0].norm.eps,
        "rope_parameters": rope_settings(rotary.to_dict()),
    }
    if channel is not None:
        found |= {"intermediate_size": channel.d_ff, "hidden_act": parts.activation_name(channel.activation)}
    return found


def windows_of(config: LanguageModelConfig) -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``, where a layer has one."""
    found = parts.window_settings(config)
    return {} if found["sliding_window"] is None else found


def _llama_settings(config: LanguageModelConfig) -> dict[str, Any]:
    block = parts.first_block(config)
    return {**settings_of(config), "attention_bias": block.mixer.qkv_bias, "mlp_bias": block.channel_mixer.bias}


def _mistral_settings(config: LanguageModelConfig) -> dict[str, Any]:
    return {**settings_of(config), "sliding_window": parts.first_block(config).mixer.window}


def _qwen_settings(config: LanguageModelConfig) -> dict[str, Any]:
    windows = windows_of(config)
    mixer = parts.first_block(config).mixer
    bias = {"attention_bias": mixer.qkv_bias} if mixer.qk_norm is not None else {}
    return {**settings_of(config), **bias, **windows, "use_sliding_window": bool(windows)}


def _moe(config: LanguageModelConfig) -> Any:
    blocks: list[Any] = list(config.blocks.values())
    return next(block.channel_mixer for block in blocks if hasattr(block.channel_mixer, "n_experts"))


def _mixtral_settings(config: LanguageModelConfig) -> dict[str, Any]:
    moe = _moe(config)
    found = {"num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff}
    return {**_mistral_settings(config), **found, "hidden_act": "silu"}


def _qwen3_moe_settings(config: LanguageModelConfig) -> dict[str, Any]:
    moe = _moe(config)
    blocks = parts.blocks_of(config)
    dense = [i for i, block in enumerate(blocks) if not hasattr(block.channel_mixer, "n_experts")]
    found = {
        "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "norm_topk_prob": moe.normalize, "mlp_only_layers": dense, "decoder_sparse_step": 1, "hidden_act": "silu",
    }
    return {**_qwen_settings(config), **found}


FAMILIES = (
    Family("llama", "LlamaForCausalLM", lambda s: prenorm(s, _biased, _dense), link, _llama_settings),
    Family("mistral", "MistralForCausalLM", lambda s: prenorm(s, _windowed, _dense), link, _mistral_settings),
    Family("qwen2", "Qwen2ForCausalLM", lambda s: prenorm(s, _qwen2, _dense), link, _qwen_settings),
    Family("qwen3", "Qwen3ForCausalLM", lambda s: prenorm(s, _qwen3, _dense), link, _qwen_settings),
    Family(
        "mixtral", "MixtralForCausalLM", lambda s: prenorm(s, lambda t, a, _: _alike(t, a), _mixtral, theta=1e6),
        partial(link, experts="block_sparse_moe", gates=("w1", "w3", "w2")), _mixtral_settings,
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", lambda s: prenorm(s, _qwen3_alike, _qwen3_moe), link, _qwen3_moe_settings),
)
