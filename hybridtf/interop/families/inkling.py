"""Inkling, Inkling 2 and its loop: relative attention with short convolutions, experts, attention residuals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig
from hybridtf.models.pattern import print_pattern

FULL, SLIDING = "hybrid", "hybrid_sliding"


def _attention(settings: Settings, kind: str, eps: float) -> Table:
    full = kind == FULL
    at = "" if full else "swa_"
    window = settings.count("sliding_window_size", settings.count("sliding_window", 1024))
    floor, alpha = settings.count("log_scaling_n_floor", 128000), settings.number("log_scaling_alpha", 0.1)
    extent = settings.count("rel_extent", 1024)
    table: Table = {
        "type": "relative_attention", "n_heads": settings.count(f"{at}num_attention_heads", 48),
        "n_kv_heads": settings.count(f"{at}num_key_value_heads", 8), "head_dim": settings.count(f"{at}head_dim", 128),
        "d_rel": settings.count("d_rel", 16), "d_conv": settings.count("conv_kernel_size", 4),
        "qk_norm": "l2_clip", "qk_clip": settings.number("qk_l2_clip_threshold", 22.627416997969522),
        "rel_clip": settings.number("rel_l2_clip_threshold", 8.0), "value_norm": True, "query_sinks": True, "output_gate": True,
        "eps": eps, "conv": "dynamic" if full else "scaled", "rel_extent": extent if full else window,
    }
    return {**table, "log_floor": floor, "log_alpha": alpha, "separate_inputs": True} if full else {**table, "window": window}


def _experts(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    settings.only("scoring_func", "sigmoid")
    experts = {
        "type": "moe", "n_experts": settings.count("n_routed_experts", 384), "top_k": settings.count("num_experts_per_tok", 8),
        "d_ff": settings.count("moe_intermediate_size", settings.count("intermediate_size", 2304)), "scores": "sigmoid",
        "selection_bias": "fixed", "routed_scale": settings.number("route_scale", 8.0), "norm_eps": 1e-20,
        "gate_softcap": settings.number("mlp_gate_softcap", 4.0), "up_softcap": settings.number("mlp_up_softcap", 25.0),
    }
    return {"type": "convolved", "d_conv": settings.count("conv_kernel_size", 4), "scaled": True, "channel_mixer": experts}


def _layers(settings: Settings) -> list[Table]:
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings)
    kinds = settings.take("layer_types", [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(n)], kind=list)
    if len(kinds) != n or set(kinds) - {FULL, SLIDING}:
        raise CheckpointError(
            f"{settings.where}: layer_types has {len(kinds)} entries for {n} layers; known here: {FULL}, {SLIDING}"
        )
    made = {kind: _attention(settings, kind, norm["eps"]) for kind in (FULL, SLIDING)}
    group = settings.count("n_layers_per_attn_res_block", 6)
    return [
        {
            "type": "attention_residual", "mixer": made[kind], "channel_mixer": _experts(settings), "norm": norm,
            "group_size": group, "key_value_mixes": kind == FULL, "depth": _depth(settings),
        }
        for kind in kinds
    ]


def _depth(settings: Settings) -> Table:
    d_model = settings.count("hidden_size")
    return {"source_norm": {"type": "rms_norm", "eps": 1e-6, "weight": False}, "values": "normed", "scale": d_model**-0.5}


def _around(settings: Settings, stack: Table) -> Table:
    vocab, norm = settings.count("vocab_size"), parts.norm(settings)
    settings.only("unpadded_vocab_size", vocab)  # else a head of fewer rows than the embedding has
    return {
        **parts.ends(settings, tied=False), "stem": {"type": "token_embedding", "norm": norm}, "final_norm": norm,
        "head": {"type": "lm_head", "tied": False, "softcap": settings.number("final_logit_softcapping", 30.0)},
        "merge": {"type": "attention_residual", **_depth(settings)}, **stack,
    }


def _inkling2(settings: Settings) -> Table:
    return _around(settings, stack_of(_layers(settings)))


def _inkling2_loop(settings: Settings) -> Table:
    """Layers of the loop are blocks of their own, each visited once a pass."""
    layers = _layers(settings)
    start, stop = settings.count("loop_layer_index_start", 6), settings.count("loop_layer_index_end", 18)
    passes, rank = settings.count("loop_num_passes", 3), settings.count("loop_gate_rank", 64)
    if not start < stop <= len(layers):
        raise CheckpointError(f"{settings.where}: a loop over layers {start} to {stop}, of {len(layers)}")
    blocks: dict[str, Table] = {}
    names = []
    for i, layer in enumerate(layers):
        if start <= i < stop:
            name, first = f"l{i}", {"first": True} if i == start else {}
            mixer = {**layer["mixer"], "separate_inputs": True}
            layer = {**layer, "mixer": mixer, "type": "looped_attention_residual", "shared": True, "gate_rank": rank, **first}
        else:
            name = "f" if layer["key_value_mixes"] else "s"
        blocks[name] = layer
        names.append(name)
    order = names[:start] + names[start:stop] * passes + names[stop:]
    return _around(settings, {"pattern": print_pattern(order), "blocks": blocks})


# -- weights -----------------------------------------------------------------------------------------------------------

_MIXER = {
    "q_proj": "wq_du", "k_proj": "wk_dv", "v_proj": "wv_dv", "out_proj": "wo_ud", "r_proj": "wr_du", "gate_proj": "gate_attn",
    "sink_proj": "attn_sink_proj", "q_norm": "q_l2_clip", "r_norm": "rel_l2_clip", "rel_bank": "rel_logits_proj.proj",
}
_SITES = {"mixer": "attn", "key": "k", "value": "v", "channel": "mlp"}
"""What reads the stream, as its gate of messages is called."""


def _visited(config: LanguageModelConfig) -> list[tuple[str, Any]]:
    """Layers as the checkpoint counts them: the module and the block of each, those of a loop once."""
    found: dict[str, Any] = {}
    for i, name in enumerate(config.layers()):
        block: Any = config.blocks[name]
        found.setdefault(f"stack.layers.shared_{name}" if block.shared else f"stack.layers.{i}", block)
    return list(found.items())


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    links.same("stem.embedding", "model.llm.embed")
    links.same("stem.norm", "model.llm.embed_norm")
    links.same("final_norm", "model.llm.norm")
    links.same("head.proj", "model.llm.unembed")
    links.same("stack.merge.attention.query", "model.llm.attn_res.output_query")
    layers = _visited(config)
    for i, (ours, block) in enumerate(layers):
        theirs = f"model.llm.layers.{i}"
        links.named(f"{ours}.mixer", f"{theirs}.attn", _MIXER)
        links.convolution(f"{ours}.mixer.out_conv", f"{theirs}.attn_sconv")
        links.convolution(f"{ours}.channel_mixer.out_conv", f"{theirs}.mlp_sconv")
        for role in ("k", "v"):
            _link_convolution(links, f"{ours}.mixer.{role}_conv", f"{theirs}.attn.{role}_sconv", block.mixer)
        own = block.key_value_mixes
        links.same(f"{ours}.mixer_norm", f"{theirs}.{'q_input_norm' if own else 'attn_norm'}")
        links.same(f"{ours}.key_norm", f"{theirs}.k_input_norm")
        links.same(f"{ours}.value_norm", f"{theirs}.v_input_norm")
        links.same(f"{ours}.channel_norm", f"{theirs}.mlp_norm")
        _link_experts(links, f"{ours}.channel_mixer.channel_mixer", f"{theirs}.mlp")
        links.same(f"{ours}.channel_depth.query", f"model.llm.attn_res.mlp_queries.{i}")
        if i and own:
            queries = [f"{ours}.{site}_depth.query" for site in ("mixer", "key", "value")]
            links.link(queries, [f"model.llm.attn_res.attn_queries.{i - 1}"], _unbound, _stacked)
        elif i:
            links.same(f"{ours}.mixer_depth.query", f"model.llm.attn_res.attn_queries.{i - 1}")
        for site, word in _SITES.items():
            for one, other in (("down_proj", "down"), ("forget_proj", "forget"), ("message_proj", "gain")):
                if links.has(f"{ours}.{site}_gate"):
                    links.same(f"{ours}.{site}_gate.{one}.weight", f"{theirs}.controllers.{word}.{other}_weight")
    looped = [ours for ours, _ in layers if links.has(f"{ours}.mixer_message")]
    for sites, name in ((("mixer", "channel"), "queries"), (("key", "value"), "kv_queries")):
        if looped:
            queries = [f"{ours}.{site}_message.query" for ours in looped for site in sites]
            links.link(queries, [f"model.llm.middle_cycle_cross_pass_{name}"], _unbound, _stacked)


def _link_convolution(links: WeightMap, ours: str, theirs: str, mixer: Any) -> None:
    """Taps that a token makes count backwards there, and stand head by head in both."""
    if mixer.conv != "dynamic":
        links.convolution(ours, theirs)
        return

    def turn(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(0, (-1, mixer.d_conv))
        return heads.flip(1).flatten(0, 1)

    links.turned(f"{ours}.weight", f"{theirs}.static_w", lambda x: x.flip(0).T, lambda x: x.T.flip(0))
    links.turned(f"{ours}.taps_proj.weight", f"{theirs}.weight_proj", turn, turn)


def _link_experts(links: WeightMap, ours: str, theirs: str) -> None:
    """Rows of gates and of what they multiply take turns there."""
    links.same(f"{ours}.router.weight", f"{theirs}.gate.weight")
    links.same(f"{ours}.selection.bias", f"{theirs}.gate.bias")

    def read(x: list[Tensor]) -> list[Tensor]:
        return [x[0][:, start::2].mT for start in range(2)]

    def write(x: list[Tensor]) -> list[Tensor]:
        return [torch.stack([one.mT for one in x], 2).flatten(1, 2)]

    links.link([f"{ours}.experts.gate_proj", f"{ours}.experts.up_proj"], [f"{theirs}.experts.w13_weight"], read, write)
    links.turned(f"{ours}.experts.down_proj", f"{theirs}.experts.w2_weight", lambda x: x.mT, lambda x: x.mT)


def _unbound(x: list[Tensor]) -> list[Tensor]:
    return list(x[0].unbind())


def _stacked(x: list[Tensor]) -> list[Tensor]:
    return [torch.stack(x)]


# -- back --------------------------------------------------------------------------------------------------------------


def _settings(config: LanguageModelConfig) -> Table:
    blocks = [block for _, block in _visited(config)]
    kinds = [FULL if block.key_value_mixes else SLIDING for block in blocks]
    block, head = blocks[0], config.head
    mixer, channel, experts = block.mixer, block.channel_mixer, block.channel_mixer.channel_mixer
    found = {
        **parts.ends_settings(config), "num_hidden_layers": len(blocks), "unpadded_vocab_size": config.vocab_size,
        "layer_types": kinds, "rms_norm_eps": block.norm.eps, "hidden_act": "silu", "d_rel": mixer.d_rel,
        "conv_kernel_size": channel.d_conv, "qk_l2_clip_threshold": mixer.qk_clip, "rel_l2_clip_threshold": mixer.rel_clip,
        "n_layers_per_attn_res_block": block.group_size, "moe_intermediate_size": experts.d_ff,
        "n_routed_experts": experts.n_experts, "num_experts_per_tok": experts.top_k, "route_scale": experts.routed_scale,
        "mlp_gate_softcap": experts.gate_softcap, "mlp_up_softcap": experts.up_softcap, "scoring_func": "sigmoid",
        "final_logit_softcapping": head.softcap,  # type: ignore[attr-defined]
    }
    return {name: value for name, value in found.items() if name != "tie_word_embeddings"} | dict(_heads(blocks, kinds))


def _heads(blocks: list[Any], kinds: list[str]) -> Iterator[tuple[str, Any]]:
    """Of each kind of layer that there is."""
    for kind, at in ((FULL, ""), (SLIDING, "swa_")):
        if kind not in kinds:
            continue
        mixer = blocks[kinds.index(kind)].mixer
        yield f"{at}num_attention_heads", mixer.n_heads
        yield f"{at}num_key_value_heads", mixer.n_kv_heads
        yield f"{at}head_dim", mixer.head_dim
        if kind == SLIDING:
            yield "sliding_window_size", mixer.window
        else:
            yield "rel_extent", mixer.rel_extent
            yield "log_scaling_n_floor", mixer.log_floor
            yield "log_scaling_alpha", mixer.log_alpha


def _loop_settings(config: LanguageModelConfig) -> Table:
    blocks = [block for _, block in _visited(config)]
    looped = [i for i, block in enumerate(blocks) if block.shared]
    start, stop = looped[0], looped[-1] + 1
    more = len(config.layers()) - len(blocks)
    return {
        **_settings(config), "loop_layer_index_start": start, "loop_layer_index_end": stop,
        "loop_num_passes": 1 + more // (stop - start), "loop_gate_rank": blocks[start].gate_rank,
    }


# -- Inkling, the first ------------------------------------------------------------------------------------------------


def _inkling(settings: Settings) -> Table:
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings)
    near = settings.take("local_layer_ids", [i for i in range(n) if (i + 1) % 6], kind=list)
    kinds = settings.take("layer_types", [SLIDING if i in near else FULL for i in range(n)], kind=list)
    sparse = ["dense" if i < settings.take("dense_mlp_idx", 0, kind=int) else "sparse" for i in range(n)]
    channels = settings.take("mlp_layer_types", sparse, kind=list)
    if {len(kinds), len(channels)} != {n} or set(kinds) - {FULL, SLIDING} or set(channels) - {"dense", "sparse"}:
        raise CheckpointError(
            f"{settings.where}: layer_types ({FULL}, {SLIDING}) and mlp_layer_types (dense, sparse) need {n} entries each"
        )
    settings.passed_over("num_mtp_layers", "mtp_local_layer_ids", "mtp_hidden_states_first", "chain_hidden_post_norm")
    settings.passed_over("number_of_conv_states", "rms_norm_eps_moe_gate")
    made = {kind: _plain_attention(settings, kind, norm["eps"]) for kind in (FULL, SLIDING)}
    layers = [
        {"mixer": made[kind], "channel_mixer": _scaled(settings, channel), "norm": norm}
        for kind, channel in zip(kinds, channels, strict=True)
    ]
    vocab = settings.count("vocab_size")
    settings.only("unpadded_vocab_size", vocab)
    head = {"type": "lm_head", "tied": False, "scale": 1.0 / settings.number("logits_mup_width_multiplier", 24.0)}
    return {
        **parts.ends(settings, tied=False), "stem": {"type": "token_embedding", "norm": norm}, "final_norm": norm, "head": head,
        **stack_of(layers),
    }


def _plain_attention(settings: Settings, kind: str, eps: float) -> Table:
    full = kind == FULL
    at = "" if full else "swa_"
    window, extent = settings.count("sliding_window_size", 512), settings.count("rel_extent", 1024)
    floor, alpha = settings.count("log_scaling_n_floor", None), settings.number("log_scaling_alpha", 0.1)
    table: Table = {
        "type": "relative_attention", "n_heads": settings.count(f"{at}num_attention_heads", 64),
        "n_kv_heads": settings.count(f"{at}num_key_value_heads", 8 if full else 16),
        "head_dim": settings.count(f"{at}head_dim", 128), "d_rel": settings.count("d_rel", 16),
        "d_conv": settings.count("conv_kernel_size", 4), "eps": eps, "rel_extent": extent if full else window,
    }
    if not full:
        return {**table, "window": window}
    return table if floor is None else {**table, "log_floor": floor, "log_alpha": alpha}


def _scaled(settings: Settings, kind: str) -> Table:
    settings.only("hidden_act", "silu")
    settings.only("shared_expert_sink", True)
    wide = settings.count("dense_intermediate_size", None)
    narrow = settings.count("moe_intermediate_size", 3072)
    d_ff = settings.count("intermediate_size", 24576)
    narrow, wide = (narrow, d_ff) if wide is None else (d_ff, wide)
    always = settings.count("n_shared_experts", 2)
    experts = {
        "type": "moe", "n_experts": settings.count("n_routed_experts", 256) + always, "n_always": always,
        "top_k": settings.count("num_experts_per_tok", 6), "d_ff": narrow, "scores": "sigmoid", "selection_bias": "fixed",
        "routed_scale": settings.number("route_scale", 8.0), "norm_eps": 0.0,
    }
    mixer = {"type": "swiglu", "d_ff": wide} if kind == "dense" else experts
    return {"type": "convolved", "d_conv": settings.count("conv_kernel_size", 4), "learned_scale": True, "channel_mixer": mixer}


def _link_inkling(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    links.same("stem.norm", "model.embed_tokens.embed_norm")
    for _, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", r_proj="r_proj", rel_bank="rel_logits_proj.proj")
        for role in ("k", "v"):
            links.convolution(f"{ours}.mixer.{role}_conv", f"{theirs}.self_attn.{role}_sconv.conv1d")
        links.convolution(f"{ours}.mixer.out_conv", f"{theirs}.attn_sconv.conv1d")
        links.convolution(f"{ours}.channel_mixer.out_conv", f"{theirs}.mlp_sconv.conv1d")
        channel, mlp = f"{ours}.channel_mixer.channel_mixer", f"{theirs}.mlp"
        if links.has(f"{channel}.router"):
            links.same(f"{ours}.channel_mixer.scale", f"{mlp}.gate.global_scale")
            links.same(f"{channel}.router", f"{mlp}.gate")
            links.same(f"{channel}.selection.bias", f"{mlp}.gate.e_score_correction_bias")
            _link_all_experts(links, channel, mlp)
        else:
            links.same(f"{ours}.channel_mixer.scale", f"{mlp}.global_scale")
            parts.link_gated(links, channel, mlp)


def _link_all_experts(links: WeightMap, ours: str, theirs: str) -> None:
    """Those that are chosen, gate and what it multiplies in one, and then those that always serve."""
    n = links.own[f"{ours}.selection.bias"][0]

    def read(x: list[Tensor]) -> list[Tensor]:
        return [torch.cat([chosen, always]).mT for chosen, always in zip(x[0].chunk(2, 1), x[1:], strict=True)]

    def write(x: list[Tensor]) -> list[Tensor]:
        gate, up = (one.mT for one in x)
        return [torch.cat([gate[:n], up[:n]], 1), gate[n:], up[n:]]

    always = f"{theirs}.shared_experts"
    names = [f"{theirs}.experts.gate_up_proj", f"{always}.gate_proj", f"{always}.up_proj"]
    links.link([f"{ours}.experts.gate_proj", f"{ours}.experts.up_proj"], names, read, write)
    links.link(
        [f"{ours}.experts.down_proj"], [f"{theirs}.experts.down_proj", f"{always}.down_proj"], lambda x: [torch.cat(x).mT],
        lambda x: [x[0][:n].mT, x[0][n:].mT],
    )


def _inkling_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    kinds = [FULL if block.mixer.window is None else SLIDING for block in blocks]
    inner = [block.channel_mixer.channel_mixer for block in blocks]
    channels = ["sparse" if hasattr(one, "n_experts") else "dense" for one in inner]
    head, mixer = config.head, blocks[0].mixer
    found = {
        **parts.ends_settings(config), "unpadded_vocab_size": config.vocab_size, "layer_types": kinds,
        "mlp_layer_types": channels, "rms_norm_eps": blocks[0].norm.eps, "hidden_act": "silu", "d_rel": mixer.d_rel,
        "conv_kernel_size": mixer.d_conv, "logits_mup_width_multiplier": _near(1.0 / head.scale), "shared_expert_sink": True,  # type: ignore[attr-defined]
    }
    for kind, one in zip(channels, inner, strict=True):
        if kind == "dense":
            found["intermediate_size"] = one.d_ff
            continue
        found |= {
            "n_routed_experts": one.n_experts - one.n_always, "n_shared_experts": one.n_always,
            "moe_intermediate_size": one.d_ff, "num_experts_per_tok": one.top_k, "route_scale": one.routed_scale,
        }
    heads = {name: value for name, value in _heads(blocks, kinds) if value is not None}
    return {name: value for name, value in found.items() if name != "tie_word_embeddings"} | heads


def _near(number: float) -> float:
    """Without what rounding added to it."""
    return float(f"{number:.14g}")


FAMILIES = (
    Family("inkling_text", "InklingForCausalLM", _inkling, _link_inkling, _inkling_settings),
    Family("inkling2_text", "Inkling2ForCausalLM", _inkling2, _link, _settings),
    Family("inkling2_loop_text", "Inkling2LoopForCausalLM", _inkling2_loop, _link, _loop_settings),
)
