"""Attention over all tokens in some layers and in a window in others: GPT-Neo, ModernBERT (decoder), Granite with windows."""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, window, windows_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

_PLAIN = {"theta": 10000.0, "fraction": 1.0}
"""A position, where no layer has one."""


def _unless_said(settings: Settings, full: list[bool]) -> None:
    """``layer_types``, where the settings do not say them."""
    if "layer_types" not in settings:
        settings.values["layer_types"] = ["full_attention" if whole else "sliding_attention" for whole in full]


# -- GPT-Neo -----------------------------------------------------------------------------------------------------------


def _neo_kinds(settings: Settings, n: int) -> list[str]:
    """``global`` or ``local`` of each layer."""
    said = settings.take("attention_types", [[["global", "local"], 12]], kind=list)
    kinds = [kind for names, times in said for kind in list(names) * times]
    if len(kinds) != n or set(kinds) - {"global", "local"}:
        raise CheckpointError(f"{settings.where}: attention_types gives {kinds}; {n} of global and local are wanted")
    settings.only("attention_layers", kinds)
    return kinds


def _gpt_neo(settings: Settings) -> Table:
    n, d_model = settings.count("num_layers"), settings.count("hidden_size")
    settings.passed_over(
        "resid_dropout", "embed_dropout", "classifier_dropout", "gradient_checkpointing", "tokenizer_class",
        "task_specific_params", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj",
    )
    norm = {"type": "layer_norm", "eps": settings.number("layer_norm_epsilon", 1e-5)}
    attention = {
        "type": "attention", "n_heads": settings.count("num_heads"), "position": {"type": "none"}, "scale": 1.0,
        "out_bias": True,
    }
    local = {**attention, "window": settings.count("window_size", 256)}
    act = parts.activation(settings, "activation_function", "gelu_new")
    channel = {"type": "mlp", "d_ff": settings.count("intermediate_size", 4 * d_model), "activation": act, "bias": True}
    layers = [
        {"mixer": local if kind == "local" else attention, "channel_mixer": channel, "norm": norm}
        for kind in _neo_kinds(settings, n)
    ]
    stem = {"type": "token_embedding", "position": {"type": "learned"}}
    return {**parts.ends(settings, tied=True), "stem": stem, "final_norm": norm, **stack_of(layers)}


def _link_gpt_neo(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="wte", norm="ln_f")
    links.same("stem.position.table", "transformer.wpe.weight")
    for _, ours, theirs in parts.each_layer(links, config, ("ln_1", "ln_2"), prefix="transformer.h"):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.attn.attention", out_proj="out_proj")
        links.same(f"{ours}.channel_mixer.up_proj", f"{theirs}.mlp.c_fc")
        links.same(f"{ours}.channel_mixer.down_proj", f"{theirs}.mlp.c_proj")
        links.passed_over(f"{theirs}.attn.attention.bias", f"{theirs}.attn.attention.masked_bias")  # masks


def _gpt_neo_settings(config: LanguageModelConfig) -> Table:
    blocks, found = parts.blocks_of(config), parts.ends_settings(config)
    found["num_layers"] = found.pop("num_hidden_layers")
    kinds = ["global" if block.mixer.window is None else "local" for block in blocks]
    sizes = [block.mixer.window for block in blocks if block.mixer.window is not None]
    return {
        **found, "num_heads": blocks[0].mixer.n_heads, "attention_types": [[kinds, 1]],
        "window_size": sizes[0] if sizes else 256,
        "layer_norm_epsilon": blocks[0].norm.eps, "intermediate_size": blocks[0].channel_mixer.d_ff,
        "activation_function": parts.activation_name(blocks[0].channel_mixer.activation),
    }


# -- ModernBERT as a decoder -----------------------------------------------------------------------------------------------

_FULL, _NEAR = "full_attention", "sliding_attention"


def _modernbert(settings: Settings) -> Table:
    n, n_heads = settings.count("num_hidden_layers"), settings.count("num_attention_heads")
    settings.passed_over(
        "cls_token_id", "sep_token_id", "embedding_dropout", "mlp_dropout", "classifier_dropout", "initializer_cutoff_factor",
    )
    norm = {"type": "layer_norm", "eps": settings.number("norm_eps", 1e-5), "bias": settings.flag("norm_bias", False)}
    every = settings.count("global_attn_every_n_layers", 3)
    _unless_said(settings, [i % every == 0 for i in range(n)])
    settings.values["sliding_window"] = settings.count("local_attention", 128) // 2  # as transformers, whatever the file says
    position = {
        _FULL: rope(settings, theta=settings.number("global_rope_theta", 160000.0), kind=_FULL),
        _NEAR: rope(settings, theta=settings.number("local_rope_theta", 10000.0), kind=_NEAR),
    }
    bias = settings.flag("attention_bias", False)
    attention = {"type": "attention", "n_heads": n_heads, "qkv_bias": bias, "out_bias": bias}
    channel = {
        "type": "glu", "d_ff": settings.count("intermediate_size", 1152), "bias": settings.flag("mlp_bias", False),
        "activation": parts.activation(settings, "hidden_activation", "gelu"),
    }
    layers: list[Table] = []
    for i in range(n):
        near = window(settings, i)
        mixer = {**attention, **near, "position": position[_NEAR if near else _FULL]}
        first = {} if i else {"mixer_norm": {"type": "none"}}
        layers.append({"mixer": mixer, "channel_mixer": channel, "norm": norm, **first})
    ends = parts.ends(settings, tied=True)
    act = parts.activation(settings, "classifier_activation", "gelu")
    transform = {"activation": act, "bias": settings.flag("classifier_bias", False), "norm": norm}
    ends["head"] |= {"bias": settings.flag("decoder_bias", True), "transform": transform}
    return {**ends, "stem": {"type": "token_embedding", "norm": norm}, "final_norm": norm, **stack_of(layers)}


def _link_modernbert(links: WeightMap, config: LanguageModelConfig) -> None:
    embedding = "model.embeddings.tok_embeddings"
    for ours, theirs in (
        ("stem.embedding", embedding), ("stem.norm", "model.embeddings.norm"), ("final_norm", "model.final_norm"),
        ("head.transform", "lm_head"), ("head.proj", "decoder"), ("head.bias", "decoder.bias"),
    ):
        links.same(ours, theirs)
    if not links.has("head.proj"):
        links.copied("decoder.weight", f"{embedding}.weight")
    for _, ours, theirs in parts.each_layer(links, config, ("attn_norm", "mlp_norm")):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.attn", out_proj="Wo")
        parts.link_fused_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp", "Wi", "Wo")


_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"), 0)
"""Where nothing is said transformers takes ids of the published vocabulary, and a smaller one has no such rows."""


def _modernbert_settings(config: LanguageModelConfig) -> Table:
    head: Any = config.head
    blocks = parts.blocks_of(config)
    mixer, channel = blocks[0].mixer, blocks[0].channel_mixer
    kinds = [_FULL if block.mixer.window is None else _NEAR for block in blocks]
    positions = {kind: rope_settings(block.mixer.position.to_dict()) for kind, block in zip(kinds, blocks, strict=True)}
    sizes = [block.mixer.window for block in blocks if block.mixer.window is not None]
    return {
        **parts.ends_settings(config), **_IDS, "num_attention_heads": mixer.n_heads, "attention_bias": mixer.qkv_bias,
        "norm_eps": blocks[0].norm.eps, "norm_bias": blocks[0].norm.bias, "layer_types": kinds,
        "local_attention": 2 * sizes[0] if sizes else 128, "rope_parameters": positions, "intermediate_size": channel.d_ff,
        "mlp_bias": channel.bias, "hidden_activation": parts.activation_name(channel.activation), "decoder_bias": head.bias,
        "classifier_bias": head.transform.bias, "classifier_activation": parts.activation_name(head.transform.activation),
    }


# -- Granite, windows and sinks ------------------------------------------------------------------------------------------


def _granite_swa(settings: Settings) -> Table:
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings)
    position = rope(settings)
    thetas = settings.take("layer_rope_theta", [position.get("theta", 10000.0)] * n, kind=list)
    if len(thetas) != n:
        raise CheckpointError(f"{settings.where}: layer_rope_theta has {len(thetas)} entries for {n} layers")
    _unless_said(settings, [i % 4 == 0 for i in range(n)])
    bias, scale = settings.flag("attention_bias", False), settings.number("residual_multiplier", 1.0)
    attention = {
        **heads(settings), "qkv_bias": bias, "out_bias": bias, "sinks": True,
        "scale": settings.number("attention_multiplier", 1.0),
    }
    channel = {
        "type": "moe", "scores": "softmax_top_k", "n_experts": settings.count("num_local_experts", 8),
        "top_k": settings.count("num_experts_per_tok", 2), "d_ff": settings.count("intermediate_size"),
        "activation": parts.activation(settings), "d_ff_shared": settings.take("shared_intermediate_size", 0, kind=int),
    }
    layers = [
        {
            "mixer": {
                **attention, **window(settings, i),
                "position": {**position, "theta": float(theta)} if theta else {"type": "none"},
            },
            "channel_mixer": channel, "norm": norm, "residual_scale": scale,
        }
        for i, theta in enumerate(thetas)
    ]
    ends = parts.ends(settings, tied=False)
    ends["head"]["scale"] = 1 / settings.number("logits_scaling", 1.0)
    stem = {"type": "token_embedding", "scale": settings.number("embedding_multiplier", 1.0)}
    return {**ends, "stem": stem, "final_norm": norm, **stack_of(layers)}


def _link_granite_swa(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for _, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", sinks="sinks")
        links.same(f"{ours}.channel_mixer.router", f"{theirs}.block_sparse_moe.router")
        experts = f"{theirs}.block_sparse_moe.experts"
        parts.link_fused_experts(links, f"{ours}.channel_mixer.experts", f"{experts}.gate_up_proj", f"{experts}.down_proj")
        if links.has(f"{ours}.channel_mixer.shared"):
            shared = f"{ours}.channel_mixer.shared"
            parts.link_fused_gated(links, shared, f"{theirs}.shared_mlp", "input_linear", "output_linear")


def _granite_swa_settings(config: LanguageModelConfig) -> Table:
    head: Any = config.head
    stem: Any = config.stem
    blocks = parts.blocks_of(config)
    mixer, moe = blocks[0].mixer, blocks[0].channel_mixer
    thetas = [getattr(block.mixer.position, "theta", 0) for block in blocks]
    told = next((block.mixer.position.to_dict() for block in blocks if block.mixer.position.type == "rope"), _PLAIN)
    return {
        **parts.ends_settings(config), "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.kv_heads,
        "rms_norm_eps": blocks[0].norm.eps, "rope_parameters": rope_settings(told), "layer_rope_theta": thetas,
        "attention_multiplier": mixer.scale, "attention_bias": mixer.qkv_bias, "residual_multiplier": blocks[0].residual_scale,
        "embedding_multiplier": stem.scale, "num_local_experts": moe.n_experts,
        "logits_scaling": parts.undone(head.scale, 1 / head.scale, lambda x: 1 / x),
        "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff, "shared_intermediate_size": moe.d_ff_shared,
        "hidden_act": parts.activation_name(moe.activation), **({"head_dim": mixer.head_dim} if mixer.head_dim else {}),
        "layer_types": ["full_attention"] * len(blocks), **windows_of(config),
    }


FAMILIES = (
    Family("gpt_neo", "GPTNeoForCausalLM", _gpt_neo, _link_gpt_neo, _gpt_neo_settings),
    Family(
        "modernbert-decoder", "ModernBertDecoderForCausalLM", _modernbert, _link_modernbert, _modernbert_settings,
    ),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", _granite_swa, _link_granite_swa, _granite_swa_settings),
)
