"""Falcon, BLOOM, MPT and OPT: layer norms and plain channel mixers, with ALiBi or other positions."""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.gpt import link_layers, plain_ends, plain_mlp, plain_norm, with_biases
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def _stack(settings: Settings, ends: Table, block: Table, final: Table, layers: str = "num_hidden_layers") -> Table:
    return {**ends, "final_norm": final, **stack_of([block] * settings.count(layers))}


# -- Falcon ------------------------------------------------------------------------------------------------------------


def _falcon(settings: Settings) -> Table:
    ends, n_heads = plain_ends(settings, {}, tied=True), settings.count("num_attention_heads")
    bias = settings.flag("bias", False)
    settings.only("apply_residual_connection_post_layernorm", False)
    settings.passed_over("ff_factor")
    new, parallel = settings.flag("new_decoder_architecture", False), settings.flag("parallel_attn", True)
    if new and not parallel:
        raise CheckpointError(f"{settings.where}: new_decoder_architecture with parallel_attn = false is no model")
    n_norms: Any = settings.only("num_ln_in_parallel_attn", *((2, 1) if new else (None, 1)))
    multi, n_kv_heads = settings.flag("multi_query", True), settings.count("num_kv_heads", n_heads)
    position = rope(settings)
    if settings.flag("alibi", False):
        position = {"type": "alibi", "scale": (ends["d_model"] // n_heads) ** -0.5}  # scores are scaled with it
    norm = plain_norm(settings, "layer_norm_epsilon")
    attention = {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": n_kv_heads if new else 1 if multi else n_heads,
        "position": position,
    }
    d_ff = settings.count("ffn_hidden_size", 4 * ends["d_model"])
    block: Table = {
        "mixer": with_biases(attention, bias), "norm": norm,
        "channel_mixer": plain_mlp(settings, d_ff, "activation", "gelu", bias=bias),
    }
    if parallel:
        block |= {"type": "parallel", "shared_norm": n_norms != 2}
    return _stack(settings, ends, block, norm)


def _link_falcon(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="word_embeddings", norm="ln_f")
    block = parts.first_block(config)
    two = block.type == "parallel" and not block.shared_norm
    names = {
        "mixer_norm": "ln_attn" if two else "input_layernorm", "channel_norm": "ln_mlp" if two else "post_attention_layernorm",
        "mixer.out_proj": "self_attention.dense", "channel_mixer.up_proj": "mlp.dense_h_to_4h",
        "channel_mixer.down_proj": "mlp.dense_4h_to_h",
    }
    link_layers(links, config, "transformer.h", names, "self_attention.query_key_value")


def _falcon_notes(config: LanguageModelConfig) -> tuple[str, ...]:
    """The slopes of 8 heads or fewer are powers of two, and bfloat16 holds whole numbers up to 256."""
    mixer = parts.first_block(config).mixer
    if mixer.position.type != "alibi" or (mixer.n_heads <= 8 and config.max_seq_len <= 256):
        return ()
    where = "scores of tokens after the 256th differ" if mixer.n_heads <= 8 else "scores differ"
    return (f"transformers rounds ALiBi to bfloat16 in every precision, which is not done here: {where}",)


def _falcon_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer, parallel = block.mixer, block.type == "parallel"
    n_heads, n_kv_heads = mixer.n_heads, mixer.n_kv_heads or mixer.n_heads
    new = parallel and (not block.shared_norm or n_kv_heads not in (1, n_heads))
    alibi = mixer.position.type == "alibi"
    return {
        **parts.ends_settings(config), "num_attention_heads": n_heads, "num_kv_heads": n_kv_heads, "bias": mixer.qkv_bias,
        "new_decoder_architecture": new, "parallel_attn": parallel, "multi_query": n_kv_heads == 1 or new,
        "num_ln_in_parallel_attn": (1 if block.shared_norm else 2) if new else None, "alibi": alibi,
        "ffn_hidden_size": block.channel_mixer.d_ff, "activation": parts.activation_name(block.channel_mixer.activation),
        "layer_norm_epsilon": block.norm.eps,
        **({} if alibi else {"rope_parameters": rope_settings(mixer.position.to_dict())}),
    }


# -- BLOOM -------------------------------------------------------------------------------------------------------------

FUSED = (
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi", "skip_bias_add",
    "skip_bias_add_qkv", "slow_but_exact",
)
"""Settings of the training code, the scores are the same; the channel mixer has four times the width, whatever ``n_inner``."""

BLOOM = {
    "hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "seq_length",
}
"""How sizes may be called, too."""


def _bloom(settings: Settings) -> Table:
    settings.passed_over(*FUSED)
    names = {usual: name for usual, name in BLOOM.items() if name in settings}
    ends, norm = plain_ends(settings, names, tied=True), plain_norm(settings, "layer_norm_epsilon")
    n_heads = settings.count(names.get("num_attention_heads", "num_attention_heads"))
    block = {
        "type": "normed_stream" if settings.flag("apply_residual_connection_post_layernorm", False) else "prenorm",
        "norm": norm,
        "mixer": with_biases({"type": "attention", "n_heads": n_heads, "position": {"type": "alibi"}}),
        "channel_mixer": {"type": "mlp", "d_ff": 4 * ends["d_model"], "activation": "gelu_tanh", "bias": True},
    }
    stem = {"type": "token_embedding", "norm": norm}
    return {**_stack(settings, ends, block, norm, names.get("num_hidden_layers", "num_hidden_layers")), "stem": stem}


def _link_bloom(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="word_embeddings", norm="ln_f")
    links.same("stem.norm", "transformer.word_embeddings_layernorm")
    names = {
        "mixer_norm": "input_layernorm", "channel_norm": "post_attention_layernorm", "mixer.out_proj": "self_attention.dense",
        "channel_mixer.up_proj": "mlp.dense_h_to_4h", "channel_mixer.down_proj": "mlp.dense_4h_to_h",
    }
    link_layers(links, config, "transformer.h", names, "self_attention.query_key_value")


def _bloom_settings(config: LanguageModelConfig) -> Table:
    block, ends = parts.first_block(config), parts.ends_settings(config)
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "seq_length": config.max_seq_len,
        "tie_word_embeddings": ends["tie_word_embeddings"], "n_layer": ends["num_hidden_layers"], "n_head": block.mixer.n_heads,
        "layer_norm_epsilon": block.norm.eps, "apply_residual_connection_post_layernorm": block.type == "normed_stream",
    }


# -- MPT ---------------------------------------------------------------------------------------------------------------

MPT = {"hidden_size": "d_model", "max_position_embeddings": "max_seq_len", "num_hidden_layers": "n_layers"}
MPT_UNREAD = ("embedding_fraction", "expansion_ratio", "init_config", "learned_pos_emb", "resid_pdrop", "verbose", "fc_type")
"""What transformers does not read: the channel mixer has four times the width, and ALiBi is the position."""


def _mpt(settings: Settings) -> Table:
    settings.passed_over(*MPT_UNREAD)
    ends, norm = plain_ends(settings, MPT, tied=True), plain_norm(settings, "layer_norm_epsilon", bias=False)
    settings.only("no_bias", True)
    settings.only("norm_type", "low_precision_layernorm")
    settings.only("logit_scale", None)
    inner = settings.inner("attn_config")
    inner.passed_over("attn_impl", "attn_pdrop")
    for name, value in (
        ("attn_type", "multihead_attention"), ("alibi", True), ("alibi_bias_max", 8), ("prefix_lm", False), ("qk_ln", False),
        ("attn_uses_sequence_id", False),
    ):
        inner.only(name, value)
    scale, clip = inner.number("softmax_scale", None), inner.number("clip_qkv", None)
    attention: Table = {"type": "attention", "n_heads": settings.count("n_heads"), "position": {"type": "alibi"}}
    block = {
        "mixer": attention | ({} if scale is None else {"scale": scale}) | ({"qkv_clip": clip} if clip else {}), "norm": norm,
        "channel_mixer": {"type": "mlp", "d_ff": 4 * ends["d_model"], "activation": "gelu"},
    }
    return _stack(settings, ends, block, norm, "n_layers")


def _link_mpt(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="wte", norm="norm_f")
    names = {
        "mixer_norm": "norm_1", "channel_norm": "norm_2", "mixer.out_proj": "attn.out_proj",
        "channel_mixer.up_proj": "ffn.up_proj", "channel_mixer.down_proj": "ffn.down_proj",
    }
    for _, ours, theirs in parts.each_layer(links, config, names, prefix="transformer.blocks"):
        links.fused([f"{ours}.mixer.{role}_proj" for role in "qkv"], f"{theirs}.attn.Wqkv")


def _mpt_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer = block.mixer
    ends = {MPT.get(name, name): value for name, value in parts.ends_settings(config).items()}
    return {
        **ends, "n_heads": mixer.n_heads, "layer_norm_epsilon": block.norm.eps, "expansion_ratio": 4,
        "attn_config": {"alibi": True, "softmax_scale": mixer.scale, "clip_qkv": mixer.qkv_clip},
    }


# -- OPT ---------------------------------------------------------------------------------------------------------------


def _opt(settings: Settings) -> Table:
    ends, bias = plain_ends(settings, {}, tied=True), settings.flag("enable_bias", True)
    settings.only("word_embed_proj_dim", ends["d_model"])
    norm: Table = {"type": "layer_norm"}
    if not settings.flag("layer_norm_elementwise_affine", True):
        norm |= {"weight": False, "bias": False}
    first = settings.flag("do_layer_norm_before", True)
    attention = {"type": "attention", "n_heads": settings.count("num_attention_heads"), "position": {"type": "none"}}
    block = {
        "type": "prenorm" if first else "postnorm", "norm": norm, "mixer": with_biases(attention, bias),
        "channel_mixer": plain_mlp(settings, settings.count("ffn_dim"), "activation_function", "relu", bias=bias),
    }
    removed = settings.flag("_remove_final_layer_norm", False)
    stem = {"type": "token_embedding", "position": {"type": "learned", "unused_rows": 2}}
    return {**_stack(settings, ends, block, norm if first and not removed else {"type": "none"}), "stem": stem}


def _link_opt(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="model.decoder", norm="final_layer_norm")
    links.same("stem.position.table", "model.decoder.embed_positions.weight")
    names = {
        "mixer_norm": "self_attn_layer_norm", "mixer_post_norm": "self_attn_layer_norm", "channel_norm": "final_layer_norm",
        "channel_post_norm": "final_layer_norm", "channel_mixer.up_proj": "fc1", "channel_mixer.down_proj": "fc2",
        **{f"mixer.{role}_proj": f"self_attn.{role}_proj" for role in ("q", "k", "v", "out")},
    }
    link_layers(links, config, "model.decoder.layers", names)


def _opt_settings(config: LanguageModelConfig) -> Table:
    block, last = parts.first_block(config), config.final_norm.type_name()
    first = block.type == "prenorm"
    return {
        **parts.ends_settings(config), "num_attention_heads": block.mixer.n_heads, "ffn_dim": block.channel_mixer.d_ff,
        "word_embed_proj_dim": config.d_model, "activation_function": parts.activation_name(block.channel_mixer.activation),
        "enable_bias": block.mixer.qkv_bias, "do_layer_norm_before": first, "layer_norm_elementwise_affine": block.norm.weight,
        "_remove_final_layer_norm": first and last == "none",
    }


FAMILIES = (
    Family("falcon", "FalconForCausalLM", _falcon, _link_falcon, _falcon_settings, notes=_falcon_notes),
    Family("bloom", "BloomForCausalLM", _bloom, _link_bloom, _bloom_settings, prefix="transformer."),
    Family("mpt", "MptForCausalLM", _mpt, _link_mpt, _mpt_settings),
    Family("opt", "OPTForCausalLM", _opt, _link_opt, _opt_settings),
)
