"""What families with delta-rule memories share: Gated DeltaNet and Kimi Delta Attention as settings and as links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.family import Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap

LINEAR, FULL = "linear_attention", "full_attention"


def layer_kinds(settings: Settings, known: Sequence[str], default: Sequence[str], name: str = "layer_types") -> list[str]:
    """The kind of each layer, of those that are ``known``."""
    kinds: list[str] = settings.take(name, list(default), kind=list)
    n = settings.count("num_hidden_layers")
    unknown = sorted({str(kind) for kind in kinds if kind not in known})
    if len(kinds) != n:
        raise CheckpointError(f"{settings.where}: {name} has {len(kinds)} entries for {n} layers")
    if unknown:
        raise CheckpointError(f"{settings.where}: {name} has {', '.join(unknown)}; known here: {', '.join(known)}")
    return kinds


def gated_delta_net(settings: Settings, keys: int, values: int, key_dim: int, value_dim: int, eps: float) -> Table:
    """A layer of Gated DeltaNet. The numbers are for what the settings do not say; ``eps``: of its output norm."""
    n_keys, n_values = settings.count("linear_num_key_heads", keys), settings.count("linear_num_value_heads", values)
    table = {
        "type": "gated_delta_net", "n_heads": n_keys, "head_dim": settings.count("linear_key_head_dim", key_dim),
        "v_dim": settings.count("linear_value_head_dim", value_dim), "d_conv": settings.count("linear_conv_kernel_dim", 4),
        "eps": eps,
    }
    return table if n_keys == n_values else {**table, "n_v_heads": n_values}


def gated_delta_net_settings(mixer: Any, d_model: int) -> Table:
    """The same as settings."""
    width = mixer.head_dim or round(0.75 * d_model / mixer.n_heads)
    return {
        "linear_num_key_heads": mixer.n_heads, "linear_num_value_heads": mixer.value_heads, "linear_key_head_dim": width,
        "linear_value_head_dim": mixer.v_dim or 2 * width, "linear_conv_kernel_dim": mixer.d_conv,
    }


def link_convolutions(links: WeightMap, ours: str, theirs: str) -> None:
    """Convolutions of queries, keys and values, (c w) each, that are one of theirs, (c 1 w)."""
    names = [f"{ours}.conv.{role}.weight" for role in "qkv"]
    sizes = [links.own[name][0] for name in names]
    links.link(
        names, [f"{theirs}.weight"], lambda x: list(x[0].squeeze(1).split(sizes)), lambda x: [torch.cat(x).unsqueeze(1)]
    )


def link_grouped(links: WeightMap, ours: Sequence[str], theirs: str, n: int) -> None:
    """Projections that are one of theirs, whose rows go through ``n`` heads: of each head the rows of every one of ours."""
    names = [f"{one}.weight" for one in ours]
    sizes = [links.own[name][0] // n for name in names]

    def read(x: list[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in x[0].unflatten(0, (n, -1)).split(sizes, 1)]

    def write(x: list[Tensor]) -> list[Tensor]:
        return [torch.cat([one.unflatten(0, (n, -1)) for one in x], 1).flatten(0, 1)]

    links.link(names, [f"{theirs}.weight"], read, write)


def link_stacked_experts(links: WeightMap, ours: str, theirs: str) -> None:
    """Experts in two tensors of theirs: gates and values (e 2f d), and the way back (e d f)."""
    names = [f"{ours}.gate_proj", f"{ours}.up_proj"]
    links.link(
        names, [f"{theirs}.gate_up_proj"], lambda x: [half.mT for half in x[0].chunk(2, 1)],
        lambda x: [torch.cat([one.mT for one in x], 1)],
    )
    links.turned(f"{ours}.down_proj", f"{theirs}.down_proj", lambda x: x.mT, lambda x: x.mT)


def link_kda(links: WeightMap, ours: str, theirs: str, *, out: str = "o_proj") -> None:
    """A layer of Kimi Delta Attention; its projections of low rank or full ones."""
    for one in ("q_proj", "k_proj", "v_proj", "b_proj", "dt_bias"):
        links.same(f"{ours}.{one}", f"{theirs}.{one}")
    for role in "qkv":
        links.convolution(f"{ours}.conv.{role}", f"{theirs}.{role}_conv1d")
    for one, other in (("decay_proj", "f"), ("gate_proj", "g")):
        if links.has(f"{ours}.{one}.down_proj"):
            links.same(f"{ours}.{one}.down_proj", f"{theirs}.{other}_a_proj")
            links.same(f"{ours}.{one}.up_proj", f"{theirs}.{other}_b_proj")
        else:
            links.same(f"{ours}.{one}", f"{theirs}.{other}_proj")
    links.same(f"{ours}.norm", f"{theirs}.o_norm")
    links.same(f"{ours}.out_proj", f"{theirs}.{out}")


def every_other(n: int, period: int) -> list[str]:
    """Attention in the last layer of each period, memories in the others."""
    return [LINEAR if (i + 1) % period else FULL for i in range(n)]
