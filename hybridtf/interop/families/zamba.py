"""Zamba and Zamba2: Mamba guided by a few transformer blocks that all hybrid layers share.

A hybrid layer is two of ours: a visit of a shared block of type ``beside``, then a ``guided`` layer of Mamba.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.scans import TRAINING
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig
from hybridtf.models.pattern import print_pattern

GATES = ("channel_mixer.gate_proj", "channel_mixer.up_proj")
QKV = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")


def _kinds(settings: Settings, default: list[str]) -> list[str]:
    """``linear_attention`` (Mamba alone) or ``hybrid`` of each layer."""
    said = settings.take("layers_block_type", settings.take("layer_types", default, kind=list), kind=list)
    kinds = ["linear_attention" if kind == "mamba" else kind for kind in said]
    n, unknown = settings.count("num_hidden_layers"), sorted({str(kind) for kind in kinds} - {"linear_attention", "hybrid"})
    if len(kinds) != n or unknown:
        what = f"unknown {', '.join(unknown)}" if unknown else f"{len(kinds)} entries for {n} layers"
        raise CheckpointError(f"{settings.where}: layers_block_type has {what}")
    settings.only("hybrid_layer_ids", [i for i, kind in enumerate(kinds) if kind == "hybrid"])
    return kinds


def _stack(settings: Settings, kinds: Sequence[str], mamba: Table, shared: Table, n_shared: int) -> Table:
    """The shared blocks are visited in turn."""
    norm = parts.norm(settings, default=1e-5)
    settings.passed_over("use_mem_eff_path", *TRAINING)
    plain = {"mixer": mamba, "norm": norm}
    blocks, names, n_visits = {"m": plain, "g": {"type": "guided", **plain}}, [], 0
    for kind in kinds:
        if kind == "hybrid":
            name = f"s{n_visits % n_shared + 1}"
            blocks[name] = {"type": "beside", "shared": True, "norm": norm, **shared}
            names += [name, "g"]
            n_visits += 1
        else:
            names.append("m")
    stack = {"pattern": print_pattern(names), "blocks": {name: block for name, block in blocks.items() if name in names}}
    return {**parts.ends(settings, tied=True), "final_norm": norm, **stack}


def _attention(settings: Settings, position: Table) -> Table:
    """Over the stream and the embedding, so of twice the width."""
    n_heads, d_model = settings.count("num_attention_heads"), settings.count("hidden_size")
    settings.only("attention_hidden_size", 2 * d_model)
    width = settings.count("attention_head_dim", settings.count("head_dim", 2 * d_model // n_heads))
    return {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", n_heads),
        "head_dim": width, "scale": (width / 2) ** -0.5, "position": position,
    }


def _glu(settings: Settings, d_ff: int, *, bias: bool = False) -> Table:
    table = {"type": "glu", "d_ff": d_ff, "activation": parts.activation(settings, default="gelu")}
    return {**table, "bias": True} if bias else table


def _zamba(settings: Settings) -> Table:
    settings.only("hidden_mamba_act", "silu")
    n, d_model, n_heads = settings.count("num_hidden_layers"), settings.count("hidden_size"), settings.count("n_mamba_heads", 2)
    rank, expand = settings.take("mamba_dt_rank", "auto"), settings.count("mamba_expand", 2)
    period, offset = settings.count("attn_layer_period", 6), settings.take("attn_layer_offset", 4, kind=int)
    default = ["linear_attention", "linear_attention", "hybrid"]
    default += ["hybrid" if i % period == offset else "linear_attention" for i in range(n - 3)]
    bias = settings.flag("mamba_proj_bias", False)
    if bias and n_heads > 1:
        raise CheckpointError(f"{settings.where}: mamba_proj_bias is true with n_mamba_heads = {n_heads}; known here: false")
    mamba: Table = {
        "type": "mamba", "d_state": settings.count("mamba_d_state", 16), "d_conv": settings.count("mamba_d_conv", 4),
        "d_inner": expand * d_model // n_heads, "dt_rank": math.ceil(d_model / 16) if rank == "auto" else rank,
        "bias": bias, "conv_bias": settings.flag("mamba_conv_bias", True),
    }
    if n_heads > 1:  # heads of Mamba are Mambas side by side
        mamba = {"type": "parallel", "branches": [mamba] * n_heads}
    glu = _glu(settings, settings.count("intermediate_size"))
    shared = {"mixer": _attention(settings, {"type": "none"}), "channel_mixer": glu}
    return _stack(settings, _kinds(settings, default), mamba, shared, 1)


def _zamba2(settings: Settings) -> Table:
    settings.only("use_conv_bias", True)
    settings.only("use_long_context", False)
    d_model, n_mamba = settings.count("hidden_size"), settings.count("n_mamba_heads", 8)
    head_dim, n_heads = int(settings.number("mamba_expand", 2) * d_model) // n_mamba, settings.count("num_attention_heads")
    settings.only("mamba_headdim", head_dim)
    settings.only("kv_channels", d_model // n_heads)
    settings.passed_over("chunk_size", "num_query_groups")
    parts.without_step_limit(settings)
    bias, rank = settings.flag("add_bias_linear", False), settings.count("adapter_rank", 128)
    mamba: Table = {
        "type": "mamba2", "d_state": settings.count("mamba_d_state", 64), "n_heads": n_mamba, "head_dim": head_dim,
        "n_groups": settings.count("mamba_ngroups", 1), "d_conv": settings.count("mamba_d_conv", 4), "bias": bias,
        **parts.steps_between(settings.number("time_step_min", 1e-3), math.inf),
    }
    placed = rope(settings)
    position = placed if settings.flag("use_mem_rope", False) else {"type": "none"}
    more = QKV if settings.flag("use_shared_attention_adapter", False) else ()
    shared = {
        "adapters": {"rank": rank, "on": [*GATES, *more], "shared_down": [*GATES]}, "mixer": _attention(settings, position),
        "channel_mixer": _glu(settings, settings.count("intermediate_size", 4 * d_model), bias=bias),
    }
    return _stack(settings, _kinds(settings, []), mamba, shared, settings.count("num_mem_blocks", 1))


# -- weights -----------------------------------------------------------------------------------------------------------


def _link_layers(links: WeightMap, config: LanguageModelConfig, shared: str) -> list[tuple[int, str, str, str]]:
    """All but the mixers and the shared blocks. Of each visit: our layer, the block's name, where it is and its first visit."""
    parts.link_ends(links, config, norm="final_layernorm")
    visits: list[tuple[int, str, str, str]] = []
    layer = 0
    for i, name in enumerate(config.layers()):
        block: Any = config.blocks[name]
        if block.type == "beside":
            at = f"model.layers.{layer}.{shared}"
            visits.append((i, name, at, next((first for _, other, _, first in visits if other == name), at)))
            continue
        ours, theirs = f"stack.layers.{i}", f"model.layers.{layer}"
        if block.type == "guided":
            links.same(f"{ours}.edge_proj", f"{theirs}.linear")
            theirs += ".mamba_decoder"
        links.same(f"{ours}.mixer_norm", f"{theirs}.input_layernorm")
        if block.mixer.type == "mamba2":
            parts.link_mamba2(links, f"{ours}.mixer", f"{theirs}.mamba")
        else:
            _link_heads(links, f"{ours}.mixer", f"{theirs}.mamba", len(getattr(block.mixer, "branches", "1")))
        layer += 1
    return visits


def _link_shared(links: WeightMap, ours: str, theirs: str) -> None:
    """What is alike in the blocks of both."""
    links.same(f"{ours}.mixer_norm", f"{theirs}.input_layernorm")
    links.same(f"{ours}.channel_norm", f"{theirs}.pre_ff_layernorm")
    parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
    links.same(f"{ours}.channel_mixer.down_proj", f"{theirs}.feed_forward.down_proj")


def _link_copies(links: WeightMap, visits: Sequence[tuple[int, str, str, str]]) -> None:
    """Some checkpoints hold a shared block once for each visit."""
    held = [name for link in links.links for name in link.theirs]
    for _, _, at, first in visits:
        for name in held if at != first else ():
            if name.startswith(first + "."):
                links.copied(at + name.removeprefix(first), name)


def _link_zamba(links: WeightMap, config: LanguageModelConfig) -> None:
    visits = _link_layers(links, config, "shared_transf")
    for _, name, at, first in visits:
        if at == first:
            _link_shared(links, f"stack.layers.shared_{name}", at)
            links.named(f"stack.layers.shared_{name}.channel_mixer", f"{at}.feed_forward", ("gate_proj", "up_proj"))
    _link_copies(links, visits)


def _link_zamba2(links: WeightMap, config: LanguageModelConfig) -> None:
    visits = _link_layers(links, config, "shared_transformer")
    for visit, (i, name, at, first) in enumerate(visits):
        if at == first:
            ours = f"stack.layers.shared_{name}"
            _link_shared(links, ours, at)
            links.fused([f"{ours}.{one}" for one in GATES], f"{at}.feed_forward.gate_up_proj")
        adapters = f"stack.layers.{i}.adapters"
        gates = [f"{adapters}.{one.replace('.', '_')}" for one in GATES]
        both = f"{first}.feed_forward.gate_up_proj_adapter_list"
        links.same(f"{gates[0]}.down", f"{both}.{visit}.0")
        links.fused([f"{one}.up" for one in gates], f"{both}.{visit}.1")
        for one in "qkv":
            for j, half in enumerate(("down", "up")):
                theirs = f"{first}.self_attn.linear_{one}_adapter_list.{visit}.{j}"
                links.same(f"{adapters}.mixer_{one}_proj.{half}", theirs)
    _link_copies(links, visits)


def _link_heads(links: WeightMap, ours: str, theirs: str, n: int) -> None:
    """Mamba of several heads: there in one tensor, with x and z of ``in_proj`` channel by channel; here one after the other."""
    heads = [ours] if n == 1 else [f"{ours}.branch{h}" for h in range(n)]

    def each(part: str) -> list[str]:
        return [f"{head}.{part}" for head in heads]

    def halves(x: list[Tensor]) -> list[Tensor]:
        return [y.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for y in x[0].chunk(n)]

    def rows(x: list[Tensor]) -> list[Tensor]:
        return [torch.cat([y.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for y in x])]

    for kind in ("weight", "bias"):
        if links.has(f"{heads[0]}.in_proj.{kind}"):
            links.link(each(f"in_proj.{kind}"), [f"{theirs}.in_proj.{kind}"], halves, rows)
    for part, other in (
        ("x_proj.weight", "x_proj_weight"), ("dt_proj.weight", "dt_proj_weight"), ("dt_bias", "dt_proj_bias"),
        ("A_log", "A_log"), ("D", "D"),
    ):
        links.link(each(part), [f"{theirs}.{other}"], lambda x: list(x[0].unbind()), lambda x: [torch.stack(x)])
    links.link(
        each("conv.weight"), [f"{theirs}.conv1d.weight"], lambda x: list(x[0].squeeze(1).chunk(n)),
        lambda x: [torch.cat(x).unsqueeze(1)],
    )
    if links.has(f"{heads[0]}.conv.bias"):
        links.fused(each("conv.bias"), f"{theirs}.conv1d.bias")
    links.fused(each("out_proj.weight"), f"{theirs}.out_proj.weight", dim=1)
    if links.has(f"{heads[0]}.out_proj.bias"):
        links.same(f"{heads[0]}.out_proj.bias", f"{theirs}.out_proj.bias")


# -- back --------------------------------------------------------------------------------------------------------------


def _shared_settings(config: LanguageModelConfig) -> tuple[Table, Any, Any, int]:
    """What both say alike; the mixer of a Mamba layer, a shared block, and how many of those there are."""
    names = config.layers()
    blocks: list[Any] = [config.blocks[name] for name in names]
    visited = [name for name, block in zip(names, blocks, strict=True) if block.type == "beside"]
    in_turn = list(dict.fromkeys(visited))
    if visited != [in_turn[i % len(in_turn)] for i in range(len(visited))]:
        raise CheckpointError("shared blocks that are not visited in turn")
    if any((one.type == "beside") != (other.type == "guided") for one, other in pairwise(blocks)):
        raise CheckpointError("a visit of a shared block without a guided layer after it")
    kinds = ["hybrid" if block.type == "guided" else "linear_attention" for block in blocks if block.type != "beside"]
    shared: Any = config.blocks[visited[0]]
    mixer, channel = shared.mixer, shared.channel_mixer
    found = {
        **parts.ends_settings(config), "num_hidden_layers": len(kinds), "layers_block_type": kinds,
        "rms_norm_eps": shared.norm.eps, "intermediate_size": channel.d_ff, "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads, "hidden_act": parts.activation_name(channel.activation),
    }
    return found, next(block.mixer for block in blocks if block.type != "beside"), shared, len(in_turn)


def _zamba_settings(config: LanguageModelConfig) -> Table:
    found, mixer, shared, n_shared = _shared_settings(config)
    if n_shared > 1:
        raise CheckpointError(f"{n_shared} shared blocks")
    branches = getattr(mixer, "branches", [mixer])
    mamba, n = branches[0], len(branches)
    width = shared.mixer.head_dim or 2 * config.d_model // shared.mixer.n_heads
    return {
        **found, "attention_head_dim": width, "n_mamba_heads": n, "mamba_d_state": mamba.d_state, "mamba_d_conv": mamba.d_conv,
        "mamba_expand": parts.whole(n * mamba.d_inner / config.d_model), "mamba_dt_rank": mamba.dt_rank,
        "mamba_proj_bias": mamba.bias, "mamba_conv_bias": mamba.conv_bias, "hidden_mamba_act": "silu",
    }


def _zamba2_settings(config: LanguageModelConfig) -> Table:
    found, mamba, shared, n_shared = _shared_settings(config)
    position, n = shared.mixer.position.to_dict(), mamba.n_heads or round(mamba.expand * config.d_model) // mamba.head_dim
    placed = {"rope_parameters": rope_settings(position)} if position["type"] == "rope" else {}
    return {
        **found, **placed, "use_mem_rope": bool(placed), "num_mem_blocks": n_shared, "adapter_rank": shared.adapters.rank,
        "use_shared_attention_adapter": len(shared.adapters.on) > len(GATES), "add_bias_linear": mamba.bias,
        "n_mamba_heads": n, "mamba_expand": parts.whole(n * mamba.head_dim / config.d_model), "mamba_d_state": mamba.d_state,
        "mamba_ngroups": mamba.n_groups, "mamba_d_conv": mamba.d_conv, "chunk_size": 256,
        "time_step_min": parts.limit_settings(mamba.dt_limit)[0],
    }


FAMILIES = (
    Family("zamba2", "Zamba2ForCausalLM", _zamba2, _link_zamba2, _zamba2_settings),
    Family("zamba", "ZambaForCausalLM", _zamba, _link_zamba, _zamba_settings),
)
