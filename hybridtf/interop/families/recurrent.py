"""Stacks of RWKV-4 and of the mLSTM (xLSTM-7B)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

# -- RWKV-4 ------------------------------------------------------------------------------------------------------------


def _rwkv(settings: Settings) -> Table:
    """transformers halves the stream every ``rescale_every`` layers and, to the same end, what later layers add: the norms are
    then as if their eps were four times as large, and nothing else changes."""
    n, eps = settings.count("num_hidden_layers"), settings.number("layer_norm_epsilon", 1e-5)
    every, d_model = settings.take("rescale_every", 6, kind=int), settings.count("hidden_size")
    mixer = {"type": "rwkv4", "d_inner": settings.count("attention_hidden_size", d_model)}
    channel = {"type": "rwkv4_channel", "d_ff": settings.count("intermediate_size", 4 * d_model)}

    def norm(layer: int, eps: float) -> Table:
        return {"type": "layer_norm", "eps": eps * 4.0 ** (layer // every if every > 0 else 0)}

    layers = [{"mixer": mixer, "channel_mixer": channel, "norm": norm(i, eps)} for i in range(n)]
    ends = parts.ends(settings, tied=False)
    return {
        **ends, "max_seq_len": settings.count("context_length", settings.count("max_position_embeddings", 1024)),
        "stem": {"type": "token_embedding", "norm": norm(0, eps)}, "final_norm": norm(n, 1e-5), **stack_of(layers),
    }


def _link_rwkv(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="rwkv", embedding="embeddings", norm="ln_out", head="head")
    links.same("stem.norm", "rwkv.blocks.0.pre_ln")
    for _, ours, theirs in parts.each_layer(links, config, ("ln1", "ln2"), prefix="rwkv.blocks"):
        links.named(f"{ours}.mixer", f"{theirs}.attention", ("time_decay", "time_first"))
        mixer = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
        channel = {"r_proj": "receptance", "up_proj": "key", "down_proj": "value"}
        for part, at, names in (("mixer", "attention", mixer), ("channel_mixer", "feed_forward", channel)):
            links.named(f"{ours}.{part}", f"{theirs}.{at}", names)
            for letter, word in (("r", "receptance"), ("k", "key"), ("v", "value")):
                if links.has(f"{ours}.{part}.mix_{letter}"):
                    links.turned(f"{ours}.{part}.mix_{letter}", f"{theirs}.{at}.time_mix_{word}", _flat, _with_axes)


def _flat(x: Tensor) -> Tensor:
    return x.flatten()


def _with_axes(x: Tensor) -> Tensor:
    return x.view(1, 1, -1)


def _rwkv_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    eps = [block.norm.eps for block in blocks]
    last: Any = config.final_norm
    every = next((i for i, one in enumerate(eps) if one != eps[0]), len(eps) if last.eps != 1e-5 else 0)
    found = {name: value for name, value in parts.ends_settings(config).items() if name != "max_position_embeddings"}
    return {
        **found, "context_length": config.max_seq_len, "layer_norm_epsilon": eps[0], "rescale_every": every,
        "attention_hidden_size": blocks[0].mixer.d_inner or config.d_model,
        "intermediate_size": blocks[0].channel_mixer.d_ff or 4 * config.d_model,
    }


# -- xLSTM -------------------------------------------------------------------------------------------------------------

_KERNELS = (
    "add_out_norm", "autocast_kernel_dtype", "chunk_size", "chunkwise_kernel", "inference_state_dtype",
    "max_inference_chunksize", "mode", "norm_reduction_force_float32", "return_last_states", "sequence_kernel", "step_kernel",
)
"""How transformers computes it; a norm stands after the blocks whatever ``add_out_norm`` says."""


def _xlstm(settings: Settings) -> Table:
    d_model = settings.count("hidden_size", settings.count("embedding_dim", 4096))
    if settings.count("embedding_dim", d_model) != d_model:
        raise CheckpointError(f"{settings.where}: embedding_dim differs from hidden_size {d_model}")
    n = settings.count("num_hidden_layers", settings.count("num_blocks", 32))
    if settings.count("num_blocks", n) != n:
        raise CheckpointError(f"{settings.where}: num_blocks differs from num_hidden_layers {n}")
    settings.only("weight_mode", "single", "fused")
    bias = settings.flag("use_bias", False)
    settings.only("tie_word_embeddings", False)
    settings.passed_over(*_KERNELS, "max_position_embeddings")
    norm = parts.norm(settings, "norm_eps")
    mixer = {
        "type": "mlstm", "n_heads": settings.count("num_heads", 8), "expand_k": settings.number("qk_dim_factor", 0.5),
        "expand_v": settings.number("v_dim_factor", 1.0), "gate_softcap": settings.number("gate_soft_cap", 15.0),
        "eps": settings.number("eps", 1e-6), "norm_eps": norm["eps"], "bias": bias,
    }
    of = settings.count("ffn_round_up_to_multiple_of", 64)
    d_ff = int((d_model * settings.number("ffn_proj_factor", 2.667) + of - 1) // of * of)
    layer = {"mixer": mixer, "channel_mixer": {"type": "swiglu", "d_ff": d_ff, "bias": bias}, "norm": {**norm, "bias": bias}}
    return {
        "vocab_size": settings.count("vocab_size", 50304), "d_model": d_model, "final_norm": norm,
        "head": {"type": "lm_head", "tied": False, "softcap": settings.number("output_logit_soft_cap", 30.0)},
        **stack_of([layer] * n),
    }


def _link_xlstm(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="backbone", embedding="embeddings", norm="out_norm")
    mixer = {
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "i_proj": "igate_preact", "f_proj": "fgate_preact",
        "gate_proj": "ogate_preact", "norm": "multihead_norm", "out_proj": "out_proj",
    }
    for _, ours, theirs in parts.each_layer(links, config, ("norm_mlstm", "norm_ffn"), prefix="backbone.blocks"):
        links.named(f"{ours}.mixer", f"{theirs}.mlstm_layer", mixer)
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.ffn", "proj_up_gate", "proj_up", "proj_down")
        wide = [f"{ours}.mixer.{one}_proj" for one in ("q", "k", "v", "gate")]
        links.also_fused(wide, f"{theirs}.mlstm_layer.qkv_opreact")
        links.also_fused([f"{ours}.mixer.i_proj", f"{ours}.mixer.f_proj"], f"{theirs}.mlstm_layer.ifgate_preact")
        both = [f"{ours}.channel_mixer.gate_proj", f"{ours}.channel_mixer.up_proj"]
        links.also_fused(both, f"{theirs}.ffn.proj_up_gate_z")


def _xlstm_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer, d_ff, head = block.mixer, block.channel_mixer.d_ff, config.head
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "embedding_dim": config.d_model,
        "num_hidden_layers": len(config.layers()), "num_blocks": len(config.layers()), "num_heads": mixer.n_heads,
        "tie_word_embeddings": False, "use_bias": mixer.bias, "norm_eps": block.norm.eps, "eps": mixer.eps,
        "qk_dim_factor": mixer.expand_k, "v_dim_factor": mixer.expand_v, "gate_soft_cap": mixer.gate_softcap,
        "output_logit_soft_cap": head.softcap,  # type: ignore[attr-defined]
        "ffn_proj_factor": d_ff / config.d_model, "ffn_round_up_to_multiple_of": d_ff, "weight_mode": "single",
        "chunk_size": mixer.chunk_size, "autocast_kernel_dtype": "float32",
    }


FAMILIES = (
    Family("rwkv", "RwkvForCausalLM", _rwkv, _link_rwkv, _rwkv_settings),
    Family("xlstm", "xLSTMForCausalLM", _xlstm, _link_xlstm, _xlstm_settings),
)
