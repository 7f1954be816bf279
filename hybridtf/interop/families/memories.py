"""What families with delta-rule memories share: Gated DeltaNet and Kimi Delta Attention as settings and as links."""

from __future__ import annotations

from typing import Any

import torch

from hybridtf.interop.family import Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap

LINEAR, FULL = "linear_attention", "full_attention"


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


def link_kda(links: WeightMap, ours: str, theirs: str, *, out: str = "o_proj") -> None:
    """A layer of Kimi Delta Attention; its projections of low rank or full ones."""
    links.named(ours, theirs, ("q_proj", "k_proj", "v_proj", "b_proj", "dt_bias"))
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
