"""DeepSeek-V4: windows and compressed entries, several streams, and experts that the first layers look up by token id."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

NEAR, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""The kinds of layers: a window alone, with entries that an indexer chooses, and with all of them."""
_RATIOS = {0: NEAR, 4: CHOSEN, 128: ALL}
"""How older files call them."""
SCORES = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
MAIN, COMPRESS = "main", "compress"


# -- settings ----------------------------------------------------------------------------------------------------------


def _list_of(settings: Settings, name: str, said: list[Any], allowed: tuple[str, ...]) -> list[str]:
    """What a list says of each layer; ``said``: where there is none."""
    n = settings.count("num_hidden_layers")
    kinds: list[str] = settings.take(name, said, kind=list)[:n]
    if len(kinds) != n or set(kinds) - set(allowed):
        raise CheckpointError(f"{settings.where}: {name} is {kinds}; {n} of {', '.join(allowed)} are wanted")
    return kinds


def _kinds(settings: Settings) -> list[str]:
    n = settings.count("num_hidden_layers")
    ratios = settings.take("compress_ratios", None, kind=list)
    said = [ALL] * min(n, 2) + [CHOSEN if i % 2 else ALL for i in range(n - 2)]
    said = said if ratios is None else [_RATIOS.get(ratio, str(ratio)) for ratio in ratios]
    return _list_of(settings, "layer_types", said, (NEAR, CHOSEN, ALL))


def _rates(settings: Settings) -> dict[str, int]:
    """Tokens of a compressed block, by the kind of layer."""
    found = settings.inner("compress_rates")
    rates = {CHOSEN: found.count(CHOSEN, 4), ALL: found.count(ALL, 128)}
    older = {CHOSEN: settings.count("compress_rate_csa", None), ALL: settings.count("compress_rate_hca", None)}
    return {NEAR: 0, **rates, **{kind: rate for kind, rate in older.items() if rate is not None}}


def _positions(settings: Settings, width: int) -> tuple[int, dict[str, Table]]:
    """Channels of a head that are told positions, and the two positions: of windows alone, and of what has entries."""
    told = settings.count("qk_rope_head_dim", None)
    share = settings.number("partial_rotary_factor", 64 / 512 if told is None else told / width)
    theta, far = settings.number("rope_theta", 10000.0), settings.number("compress_rope_theta", 160000.0)
    name = "rope_parameters" if "rope_parameters" in settings else "rope_scaling"
    said = dict(settings.take(name, {}, kind=dict))
    if MAIN not in said or COMPRESS not in said:
        yarn = {"attention_factor": 1.0} if said.get("rope_type", said.get("type")) == "yarn" else {}
        said = {MAIN: {"rope_theta": theta}, COMPRESS: {**yarn, **said, "rope_theta": far, "partial_rotary_factor": share}}
        settings.values[name] = said
    found = {}
    for kind in (MAIN, COMPRESS):
        position = rope(settings, fraction=share, kind=kind)
        if position.pop("fraction", 1.0) != share:
            raise CheckpointError(f"{settings.where}: {name}: partial_rotary_factor of {kind} is not {share}")
        found[kind] = {**position, "interleaved": True}
    if told not in (None, int(width * share)):
        raise CheckpointError(f"{settings.where}: qk_rope_head_dim is {told}, and partial_rotary_factor {share}")
    return int(width * share), found


def _mixers(settings: Settings, norm: Table) -> dict[str, Table]:
    """Attention, by the kind of layer."""
    settings.only("num_key_value_heads", 1)
    settings.only("attention_bias", False)
    width = settings.count("head_dim", 512)
    told, positions = _positions(settings, width)
    rates = _rates(settings)
    base = {
        "type": "compressed_attention", "n_heads": settings.count("num_attention_heads"), "head_dim": width,
        "q_lora_rank": settings.count("q_lora_rank", 1024), "qk_rope_head_dim": told,
        "window": settings.count("sliding_window", 128), "n_out_groups": settings.count("o_groups", 8),
        "o_lora_rank": settings.count("o_lora_rank", 1024), "norm": norm, "q_norm": {**norm, "weight": False},
    }
    chosen = {
        "index_top_k": settings.count("index_topk", 512), "index_n_heads": settings.count("index_n_heads", 64),
        "index_head_dim": settings.count("index_head_dim", 128),
    }
    return {
        kind: {
            **base, "compress_rate": rates[kind], "overlap": kind == CHOSEN,
            "position": positions[MAIN if kind == NEAR else COMPRESS], **(chosen if kind == CHOSEN else {"index_top_k": 0}),
        }
        for kind in (NEAR, CHOSEN, ALL)
    }


def _experts(settings: Settings) -> dict[str, Table]:
    """Experts, by how they are chosen."""
    settings.only("norm_topk_prob", True)
    settings.only("n_shared_experts", 1)
    settings.only("mlp_bias", False)
    settings.passed_over("num_nextn_predict_layers")
    width = settings.count("moe_intermediate_size", 2048)
    base = {
        "type": "moe", "n_experts": settings.count("n_routed_experts", 256), "top_k": settings.count("num_experts_per_tok", 6),
        "scores": SCORES[settings.only("scoring_func", *SCORES)], "d_ff": width, "d_ff_shared": width,
        "routed_scale": settings.number("routed_scaling_factor", 1.5), "limit": settings.number("swiglu_limit", 10.0),
        "activation": parts.activation(settings),
    }
    return {"moe": {**base, "selection_bias": "fixed"}, "hash_moe": {**base, "choice": "token_id"}}


def _table(settings: Settings) -> Table:
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings)
    looked_up = settings.take("num_hash_layers", 3, kind=int)
    said = ["hash_moe" if i < looked_up else "moe" for i in range(n)]
    channels = _list_of(settings, "mlp_layer_types", said, ("hash_moe", "moe"))
    mixers, experts = _mixers(settings, norm), _experts(settings)
    streams = parts.streams(settings, norm)
    layers = [
        {**streams, "mixer": mixers[kind], "channel_mixer": experts[channel]}
        for kind, channel in zip(_kinds(settings), channels, strict=True)
    ]
    merge = {"type": "sigmoid", "eps": streams["eps"], "norm_eps": norm["eps"]}
    return {**parts.ends(settings, tied=False), "final_norm": norm, "merge": merge, **stack_of(layers)}


# -- weights -----------------------------------------------------------------------------------------------------------

_ATTENTION = {
    "q_a_proj": "wq_a", "q_a_norm": "q_norm", "q_b_proj": "wq_b", "kv_proj": "wkv", "kv_norm": "norm",
    "out_proj": "wo_b", "sinks": "attn_sink", "indexer.q_proj": "indexer.wq_b",
    "indexer.weights_proj": "indexer.weights_proj",
    **{
        f"{of}compressor.{one}": f"{of}compressor.{other}" for of in ("", "indexer.")
        for one, other in (("kv_proj", "wkv"), ("gate_proj", "wgate"), ("position_bias", "ape"), ("norm", "norm"))
    },
}
_UNIT = ("w1", "w3", "w2")


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, head="head")
    links.passed_over("mtp.", "model.mtp.")
    parts.link_streams(links, "stack.merge.streams", "model.hc_head.hc_")
    for block, ours, theirs in parts.each_layer(links, config, ("attn_norm", "ffn_norm")):
        parts.link_streams(links, f"{ours}.mixer_streams", f"{theirs}.hc_attn_")
        parts.link_streams(links, f"{ours}.channel_streams", f"{theirs}.hc_ffn_")
        links.named(f"{ours}.mixer", f"{theirs}.attn", _ATTENTION)
        links.turned(
            f"{ours}.mixer.out_a_proj.weight", f"{theirs}.attn.wo_a.weight",
            partial(_by_group, n_groups=block.mixer.n_out_groups), lambda x: x.mT.flatten(0, 1),
        )
        links.same(f"{ours}.channel_mixer.table.experts", f"{theirs}.ffn.gate.tid2eid")
        parts.link_channel(
            links, f"{ours}.channel_mixer", f"{theirs}.ffn", block.channel_mixer, gates=_UNIT, bias="gate.bias",
            unit=partial(parts.link_gated, gate=_UNIT[0], up=_UNIT[1], down=_UNIT[2]),
        )


def _by_group(x: Tensor, n_groups: int) -> Tensor:
    """(groups * out, in) as (groups in out)."""
    grouped: Tensor = x.unflatten(0, (n_groups, -1)).mT
    return grouped


# -- back --------------------------------------------------------------------------------------------------------------


def _kind_of(mixer: Any) -> str:
    return CHOSEN if mixer.index_top_k else ALL if mixer.compress_rate else NEAR


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mixers = {_kind_of(block.mixer): block.mixer for block in blocks}
    block, mixer, experts = blocks[0], blocks[0].mixer, blocks[0].channel_mixer
    share = mixer.qk_rope_head_dim / mixer.head_dim
    near, far = mixers.get(NEAR, mixer), mixers.get(CHOSEN, mixers.get(ALL, mixer))
    positions = {MAIN: near.position.to_dict(), COMPRESS: far.position.to_dict()}
    chosen = mixers.get(CHOSEN)
    index = {} if chosen is None else {
        "index_topk": chosen.index_top_k, "index_n_heads": chosen.index_n_heads, "index_head_dim": chosen.index_head_dim,
    }
    return {
        **parts.ends_settings(config), "rms_norm_eps": block.norm.eps, "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": 1, "head_dim": mixer.head_dim, "q_lora_rank": mixer.q_lora_rank,
        "sliding_window": mixer.window, "o_groups": mixer.n_out_groups, "o_lora_rank": mixer.o_lora_rank, **index,
        "compress_rates": {kind: mixers[kind].compress_rate for kind in (CHOSEN, ALL) if kind in mixers},
        "partial_rotary_factor": share, "rope_theta": near.position.theta, "compress_rope_theta": far.position.theta,
        "rope_parameters": {
            kind: {**rope_settings(position), "partial_rotary_factor": share} for kind, position in positions.items()
        },
        "layer_types": [_kind_of(one.mixer) for one in blocks],
        "mlp_layer_types": ["hash_moe" if one.channel_mixer.choice == "token_id" else "moe" for one in blocks],
        "hc_mult": block.n_streams, "hc_sinkhorn_iters": block.sinkhorn_iters, "hc_eps": block.eps,
        "n_routed_experts": experts.n_experts, "num_experts_per_tok": experts.top_k, "moe_intermediate_size": experts.d_ff,
        "n_shared_experts": 1, "scoring_func": {ours: theirs for theirs, ours in SCORES.items()}[experts.scores],
        "routed_scaling_factor": experts.routed_scale, "swiglu_limit": experts.limit, "norm_topk_prob": True,
        "hidden_act": parts.activation_name(experts.activation), **parts.NO_TOKENS,
    }


FAMILIES = (Family("deepseek_v4", "DeepseekV4ForCausalLM", _table, _link, _settings),)
