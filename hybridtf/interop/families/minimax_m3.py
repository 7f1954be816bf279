"""MiniMax-M3, its text model: some layers attend to the blocks that an indexer chooses for each key head, some to all; experts
with a bounded and shifted gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
GATE = {"activation": "quick_gelu", "up_shift": 1.0}


def _kinds(settings: Settings, name: str, known: tuple[str, str], said: Any) -> list[bool]:
    """Of each layer whether it is of the second kind; ``said``: by an older key, 0 or 1 for each layer."""
    n = settings.count("num_hidden_layers")
    older = None if said is None else [known[bool(one)] for one in said]
    kinds = parts.kinds(settings, known, older or [known[name == "mlp_layer_types"]] * n, name)
    return [kind == known[1] for kind in kinds]


def _mixers(settings: Settings, older: Settings, norm: Table) -> tuple[Table, Table]:
    """Attention to all, and to chosen blocks; ``older``: the table that published files have of it."""
    width = settings.count("head_dim", 128)
    position = rope(settings, theta=5000000.0, fraction=1.0)
    told = int(width * position.get("fraction", 1.0))
    settings.passed_over("rotary_dim")  # their code turns what the fraction says

    def count(name: str, before: str, default: int) -> int:
        return older.count(before, settings.count(name, default))

    index_width = count("index_head_dim", "sparse_index_dim", 128)
    if told > index_width:
        raise CheckpointError(f"{settings.where}: {told} channels tell positions, and the indexer has {index_width}")
    share = parts.undone(told, told / index_width, lambda part: int(index_width * part))
    whole = {**heads(settings, width=width), "position": position, "qk_norm": norm}
    local = older.take("sparse_local_block", settings.take("index_local_blocks", 1, kind=int), kind=int)
    return whole, {
        **whole, "type": "block_indexed_attention", "block_size": count("index_block_size", "sparse_block_size", 128),
        "top_k": count("index_topk_blocks", "sparse_topk_blocks", 16), "n_local": local,
        "index_n_heads": count("index_n_heads", "sparse_num_index_heads", 4), "index_head_dim": index_width,
        "index_norm": norm, "index_position": {**position, "fraction": share},
    }


def _older(settings: Settings) -> tuple[Settings, Any]:
    """The table that published files have of sparse attention, and which layers have it."""
    older = settings.inner("sparse_attention_config")
    older.only("use_sparse_attention", True)
    older.only("sparse_score_type", "max")  # of a block the best token counts
    older.only("sparse_init_block", 0)
    sparse = older.take("sparse_attention_freq", None, kind=list)
    scored = older.take("sparse_disable_index_value", sparse, kind=list)
    if any(one and not other for one, other in zip(sparse or [], scored or [], strict=False)):
        raise CheckpointError(f"{older.where}: sparse_disable_index_value is 0 where a layer is sparse; indexers only choose")
    return older, sparse


def _table(settings: Settings) -> Table:
    settings.only("hidden_act", "silu", "swigluoai")
    settings.only("swiglu_alpha", 1.702)
    norm = {**parts.norm(settings), "unit_offset": True}
    gate = {**GATE, "limit": settings.number("swiglu_limit", 7.0)}
    older, said = _older(settings)
    whole, chosen = _mixers(settings, older, norm)
    sparse = _kinds(settings, "layer_types", (FULL, SPARSE), said)
    has = _kinds(settings, "mlp_layer_types", ("dense", "sparse"), settings.take("moe_layer_freq", None, kind=list))
    dense = {"type": "glu", "d_ff": settings.count("dense_intermediate_size", 12288), **gate}
    experts = {
        "type": "moe", "scores": "sigmoid", "selection_bias": "fixed", "n_experts": settings.count("num_local_experts", 128),
        "top_k": settings.count("num_experts_per_tok", 4), "d_ff": settings.count("intermediate_size", 3072),
        "d_ff_shared": settings.count("shared_intermediate_size", 3072), "norm_eps": 0.0, **gate,
        "routed_scale": settings.number("routed_scaling_factor", 2.0),
    }
    layers = [
        {"mixer": chosen if one else whole, "channel_mixer": experts if other else dense, "norm": norm}
        for one, other in zip(sparse, has, strict=True)
    ]
    return parts.stack(settings, layers, norm)


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    """Text alone is written under the names that it has in memory, the whole under those of the published files."""
    _link_names(links, config, Memory())
    published = WeightMap(links.own, links.whole)
    _link_names(published, config, Published())
    links.others += published.links


class Memory:
    """How transformers calls what the two name differently: tensors of the indexer and parts of the experts."""

    indexer, moe, bias = "indexer.", "mlp", "gate.e_score_correction_bias"

    def gated(self, links: WeightMap, ours: str, theirs: str) -> None:
        links.fused([f"{ours}.gate_proj", f"{ours}.up_proj"], f"{theirs}.gate_up_proj")

    def experts(self, links: WeightMap, ours: str, theirs: str, n: int) -> None:
        parts.link_fused_experts(links, ours, f"{theirs}.gate_up_proj", f"{theirs}.down_proj")


class Published(Memory):
    """The same of the files. Two links of memory are one here, which takes their place as a whole."""

    indexer, moe, bias = "index_", "block_sparse_moe", "e_score_correction_bias"

    def gated(self, links: WeightMap, ours: str, theirs: str) -> None:
        both = ("gate_proj.weight", "up_proj.weight")
        links.link([f"{ours}.{one}" for one in both], [f"{theirs}.{one}" for one in both], lambda x: x, lambda x: x)

    def experts(self, links: WeightMap, ours: str, theirs: str, n: int) -> None:
        def read(x: list[Tensor]) -> list[Tensor]:
            return [torch.stack([one.mT for one in half]) for half in (x[:n], x[n:])]

        def write(x: list[Tensor]) -> list[Tensor]:
            return [one.mT for half in x for one in half.unbind()]

        names = [f"{theirs}.{i}.{word}.weight" for word in ("w1", "w3") for i in range(n)]
        links.link([f"{ours}.gate_proj", f"{ours}.up_proj"], names, read, write)
        links.stacked(f"{ours}.down_proj", [f"{theirs}.{i}.w2.weight" for i in range(n)])


def _link_names(links: WeightMap, config: LanguageModelConfig, naming: Memory) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
        for one in ("q_proj", "k_proj", "q_norm", "k_norm"):
            links.same(f"{ours}.mixer.indexer.{one}", f"{theirs}.self_attn.{naming.indexer}{one}")
        mine, yours = f"{ours}.channel_mixer", f"{theirs}.mlp"
        if links.has(f"{mine}.router"):
            yours = f"{theirs}.{naming.moe}"
            links.same(f"{mine}.router", f"{yours}.gate")
            links.same(f"{mine}.selection.bias", f"{yours}.{naming.bias}")
            experts: Any = block.channel_mixer
            naming.experts(links, f"{mine}.experts", f"{yours}.experts", experts.n_experts)
            mine, yours = f"{mine}.shared", f"{yours}.shared_experts"
        naming.gated(links, mine, yours)
        links.same(f"{mine}.down_proj", f"{yours}.down_proj")


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mixer = parts.first_of(blocks, "block_indexed_attention")
    moe = next(block.channel_mixer for block in blocks if block.channel_mixer.type == "moe")
    dense = next((block.channel_mixer for block in blocks if block.channel_mixer.type == "glu"), moe)
    width = mixer.head_dim or config.d_model // mixer.n_heads
    return {
        **parts.ends_settings(config), **parts.NO_TOKENS, "rms_norm_eps": blocks[0].norm.eps, "hidden_act": "silu",
        "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.kv_heads, "head_dim": width,
        "rope_parameters": rope_settings(mixer.position.to_dict()), "rotary_dim": int(width * mixer.position.fraction),
        "layer_types": [SPARSE if block.mixer.type == "block_indexed_attention" else FULL for block in blocks],
        "mlp_layer_types": ["sparse" if block.channel_mixer.type == "moe" else "dense" for block in blocks],
        "index_n_heads": mixer.index_n_heads, "index_head_dim": mixer.index_head_dim, "index_block_size": mixer.block_size,
        "index_topk_blocks": mixer.top_k, "index_local_blocks": mixer.n_local, "dense_intermediate_size": dense.d_ff,
        "intermediate_size": moe.d_ff, "shared_intermediate_size": moe.d_ff_shared, "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k, "routed_scaling_factor": moe.routed_scale, "swiglu_alpha": 1.702,
        "swiglu_limit": moe.limit,
    }


FAMILIES = (Family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", _table, _link, _settings),)
