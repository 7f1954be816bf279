"""Calls of ``attention`` for the contract kit: grouped heads, windows, soft cap, slopes, sinks, and both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.core.segments import Segments
from hybridtf.ops.attention.mask import AttentionMask
from hybridtf.ops.documents import mask_pads

HEADS, KEY_HEADS = 4, 2


def draw(width: int, v_width: int, fixed: tuple[str, ...], gen: torch.Generator, b: int, t: int) -> OpInputs:
    """Queries, keys and values, and ``fixed`` numbers of each head that are not negative."""
    timed = {"q": randn(gen, b, t, HEADS, width), "k": randn(gen, b, t, KEY_HEADS, width)}
    timed["v"] = randn(gen, b, t, KEY_HEADS, v_width)
    return OpInputs(timed, {name: randn(gen, HEADS).abs() for name in fixed})


def masked(inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]) -> tuple[list[Tensor], AttentionMask]:
    """q, k and v without what pads hold, as every caller gives them, and the mask of the documents."""
    given = [mask_pads(inputs.timed[name], segments) for name in ("q", "k", "v")]
    if segments is None:
        return given, AttentionMask(**options)
    ids, pos = segments.ids, segments.position
    return given, AttentionMask(q_ids=ids, k_ids=ids, q_pos=pos, k_pos=pos, **options)


def _run(op: Callable[..., Tensor], inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]) -> Tensor:
    given, mask = masked(inputs, segments, {**options, **inputs.fixed})
    return op(*given, mask)


CASES: tuple[OpCase, ...] = tuple(
    OpCase(
        "attention", name, partial(draw, 4, v_width, fixed), options, {"head_dim": 4, "v_dim": v_width}, frozenset(features),
        causal="causal" not in options, run=_run,
    )
    for name, v_width, fixed, options, features in (
        ("causal", 4, (), {}, ()),
        ("both ways, other width of values", 3, (), {"causal": False}, ()),
        ("window, sinks", 4, ("sinks",), {"window": 3}, ("window", "sinks")),
        ("soft cap, slopes", 4, ("slopes",), {"softcap": 2.0}, ("softcap", "slopes")),
    )
)
