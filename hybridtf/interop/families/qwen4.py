"""Qwen4-Exp, its text model: Gated DeltaNet and attention to chosen tokens over gated streams, with tables of n-grams before
some layers."""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import memories, parts
from hybridtf.interop.families.memories import FULL, LINEAR
from hybridtf.interop.families.qwen_hybrids import DT_START
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

INDEXED = "indexed_attention"


def _attention(settings: Settings, norm: Table) -> Table:
    position = rope(settings, fraction=1.0, sections=True)
    width, index_width = settings.count("head_dim", 256), settings.count("indexer_head_dim")
    told = int(width * position.get("fraction", 1.0))
    if told > index_width:
        raise CheckpointError(f"{settings.where}: {told} channels tell positions, and the indexer has {index_width}")
    share = parts.undone(told, told / index_width, lambda part: int(index_width * part))
    settings.only("indexer_kv_heads", 1)
    bias = settings.flag("attention_bias", False)
    return {
        "type": "indexed_attention", "output_gate": True, "index_pooling": "mean", "index_weights": False,
        "n_heads": settings.count("num_attention_heads", 16), "head_dim": width, "qk_norm": norm,
        "n_kv_heads": settings.count("num_key_value_heads", 2), "position": position, "qkv_bias": bias, "out_bias": bias,
        "index_n_heads": settings.count("indexer_n_heads"), "index_head_dim": index_width, "index_q_norm": norm,
        "index_k_norm": norm, "index_top_k": settings.count("indexer_budget"),
        "index_pool": settings.count("indexer_compress_ratio"), "index_position": {**position, "fraction": share},
    }


def _memory(settings: Settings, eps: float) -> Table:
    settings.only("hidden_act", "silu")
    gate = settings.only("output_gate_type", "silu", "sigmoid")
    table = {**memories.gated_delta_net(settings, 16, 32, 128, 128, eps), "dt_range": DT_START}
    return table if gate == "silu" else {**table, "gate_activation": gate}


def _ngrams(settings: Settings, norm: Table, n_streams: int) -> dict[int, Table]:
    """What stands before some layers, by their number."""
    names = (
        "ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "seed",
        "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "number_of_conv_states",
    )
    settings.passed_over(*names)  # where there are no such layers they say nothing
    places = sorted(set(settings.take("ple_layer_ids", [], kind=list)))
    if not places:
        return {}
    ends = settings.take("eos_token_id", kind=(list, int))
    table = {
        "type": "engram", "vocab_size": settings.count("vocab_size"), "ngram_size": settings.count("ngram_size", 3),
        "n_hashes": settings.count("heads_per_ngram", 8), "table_size": settings.count("ngram_vocab_size_base", 20_000_000),
        "d_embed": settings.count("ple_embed_dim", settings.count("hidden_size")), "n_streams": n_streams, "norm": norm,
        "start_token": ends[0] if isinstance(ends, list) else ends, "seed": settings.take("seed", 1234, kind=int),
        "table_multiple": settings.count("make_ngram_vocab_size_divisible_by", 128),
        "table_parts": settings.count("split_ngram_parts", 512), "d_conv": settings.count("ple_conv_kernel_size", 4),
    }
    return {layer - 1: {**table, "place": place} for place, layer in enumerate(places)}


def _table(settings: Settings) -> Table:
    norm = {**parts.norm(settings), "unit_offset": True}
    n, period = settings.count("num_hidden_layers"), settings.count("full_attention_interval", 4)
    default = [INDEXED if kind == FULL else kind for kind in memories.every_other(n, period)]
    kinds = parts.kinds(settings, (LINEAR, INDEXED, FULL), default)  # published files say full_attention
    n_streams, rank = settings.count("hc_count", 4), settings.count("hc_lowrank", 320)
    mixers = {kind: _attention(settings, norm) for kind in {*kinds} - {LINEAR}}
    mixers[LINEAR] = _memory(settings, norm["eps"])
    moe = {
        "type": "moe", "n_experts": settings.count("num_experts", 512), "top_k": settings.count("num_experts_per_tok", 10),
        "d_ff": settings.count("moe_intermediate_size", 512), "normalize": settings.flag("norm_topk_prob", True),
        "d_ff_shared": settings.count("shared_expert_intermediate_size", 512), "shared_gate": True,
    }
    before = _ngrams(settings, norm, n_streams)
    layers: list[Table] = []
    for i, kind in enumerate(kinds):
        layers += [before[i]] if i in before else []
        wiring = {"type": "gated_residual", "n_streams": n_streams, "rank": rank, "norm": norm}
        layers.append({**wiring, "mixer": mixers[kind], "channel_mixer": moe})
    merge = {"type": "gated", "rank": rank, "norm": norm}
    return {**parts.ends(settings, tied=False), "final_norm": {"type": "none"}, "merge": merge, **stack_of(layers)}


# -- weights ---------------------------------------------------------------------------------------------------------


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    links.passed_over("mtp.")  # tells further tokens
    _link_streams(links, "stack.merge.streams", "model.hyper_connection_mixer")
    number = 0
    for i, name in enumerate(config.layers()):
        block: Any = config.blocks[name]
        ours, theirs = f"stack.layers.{i}", f"model.layers.{number}"
        if block.type == "engram":
            _link_ngrams(links, ours, f"{theirs}.ple", block)
            continue
        number += 1
        for branch, other in (("mixer", "attn"), ("channel", "mlp")):
            at, there = f"{ours}.{branch}_streams", f"{theirs}.{other}_hyper_connection"
            _link_streams(links, f"{at}.gate", there)
            links.same(f"{at}.take_proj", f"{there}.block_inject_weight")
        if block.mixer.type == "gated_delta_net":
            _link_memory(links, f"{ours}.mixer", f"{theirs}.linear_attn")
        else:
            _link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn", block.mixer.n_heads)
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer, shared="shared_expert")


def _of_streams(links: WeightMap, ours: str, theirs: str) -> None:
    """A norm for each stream, side by side there."""
    names: list[str] = []
    while links.has(f"{ours}.{len(names)}"):
        names.append(f"{ours}.{len(names)}")
    links.fused(names, theirs)


def _link_streams(links: WeightMap, ours: str, theirs: str) -> None:
    _of_streams(links, f"{ours}.norms", f"{theirs}.hc_norm")
    links.same(f"{ours}.down_proj", f"{theirs}.input_mix_weight_down")
    links.same(f"{ours}.up_proj", f"{theirs}.input_mix_weight_up")


def _link_memory(links: WeightMap, ours: str, theirs: str) -> None:
    links.named(ours, theirs, ("A_log", "dt_bias", "norm", "out_proj"))
    memories.link_convolutions(links, ours, f"{theirs}.conv1d")
    links.fused([f"{ours}.{role}_proj" for role in "qkv"], f"{theirs}.in_proj_qkv")
    for one, other in (("gate", "z"), ("b", "b"), ("a", "a")):
        links.same(f"{ours}.{one}_proj", f"{theirs}.in_proj_{other}")


def _link_attention(links: WeightMap, ours: str, theirs: str, n_heads: int) -> None:
    parts.link_grouped(links, [f"{ours}.q_proj", f"{ours}.gate_proj"], f"{theirs}.q_proj", n_heads)
    parts.link_attention(links, ours, theirs, q_proj=None)
    links.fused([f"{ours}.indexer.q_proj", f"{ours}.indexer.k_proj"], f"{theirs}.indexer.index_qk_proj")
    for one in "qk":
        links.same(f"{ours}.indexer.{one}_norm", f"{theirs}.indexer.{one}_layernorm")


def _link_ngrams(links: WeightMap, ours: str, theirs: str, block: Any) -> None:
    table = f"{theirs}.ple_embedding"
    for one in ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"):
        links.passed_over(f"{table}.{one}")  # the settings give them
    own, n = f"{ours}.ngrams.embedding", block.table_parts
    rows = links.own[f"{own}.weight"][0]
    each = -(-rows // n)
    sizes = [min(each, rows - start) for start in range(0, rows, each)]
    links.joined(own, [f"{table}.ngram_embedding.shard_{i}" for i in range(len(sizes))], sizes)
    links.named(ours, theirs, ("key_proj", "value_proj"))
    for one in ("key", "query", "conv"):
        _of_streams(links, f"{ours}.{one}_norms", f"{theirs}.norm_{one}")
    links.convolution(f"{ours}.conv", f"{theirs}.conv1d")


# -- settings of a model of ours -------------------------------------------------------------------------------------


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    kept = [block for block in blocks if block.type != "engram"]
    attention, memory = parts.first_of(kept, "indexed_attention"), parts.first_of(kept, "gated_delta_net")
    moe, first = kept[0].channel_mixer, kept[0]
    return {
        **parts.ends_settings(config), **parts.NO_TOKENS, **memories.gated_delta_net_settings(memory, config.d_model),
        "num_hidden_layers": len(kept), "hidden_act": "silu", "output_gate_type": memory.gate_activation,
        "rms_norm_eps": first.norm.eps, "hc_count": first.n_streams, "hc_lowrank": first.rank,
        "layer_types": [LINEAR if block.mixer.type == "gated_delta_net" else INDEXED for block in kept],
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim or config.d_model // attention.n_heads, "attention_bias": attention.qkv_bias,
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope_settings(attention.position.to_dict())},
        "indexer_n_heads": attention.index_n_heads, "indexer_kv_heads": 1, "indexer_head_dim": attention.index_head_dim,
        "indexer_budget": attention.index_top_k, "indexer_compress_ratio": attention.index_pool,
        "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "shared_expert_intermediate_size": moe.d_ff_shared, "norm_topk_prob": moe.normalize, **_ngram_settings(config, blocks),
    }


def _ngram_settings(config: LanguageModelConfig, blocks: list[Any]) -> Table:
    places = [i for i, block in enumerate(blocks) if block.type == "engram"]
    if not places:
        return {}
    ours = blocks[places[0]]
    return {
        "ple_layer_ids": [at - before + 1 for before, at in enumerate(places)], "ngram_size": ours.ngram_size,
        "ple_embed_dim": ours.d_embed or config.d_model, "ple_conv_kernel_size": ours.d_conv, "seed": ours.seed,
        "heads_per_ngram": ours.n_hashes, "ngram_vocab_size_base": ours.table_size, "eos_token_id": ours.start_token,
        "make_ngram_vocab_size_divisible_by": ours.table_multiple, "split_ngram_parts": ours.table_parts,
    }


FAMILIES = (Family("qwen4_exp_text", "Qwen4ExpForCausalLM", _table, _link, _settings),)
