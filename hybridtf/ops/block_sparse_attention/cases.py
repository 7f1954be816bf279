"""Calls of ``block_sparse_attention`` for the contract kit: every clause of a rule, marked keys, chosen blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs
from hybridtf.core.segments import Segments
from hybridtf.ops.attention.cases import draw, masked
from hybridtf.ops.block_sparse_attention.held import hold
from hybridtf.ops.block_sparse_attention.rule import SparseRule


def _draw(marked: bool, choosers: int, gen: torch.Generator, b: int, t: int) -> OpInputs:
    """Of seven blocks each query chooses three, different ones, or fewer."""
    timed = dict(draw(4, 3, (), gen, b, t).timed)
    if marked:
        timed["marked"] = torch.rand(b, t, generator=gen) < 0.2
    if choosers:
        blocks = torch.rand(b, t, choosers, 7, generator=gen).argsort(-1)[..., :3]
        timed["blocks"] = torch.where(torch.rand(b, t, choosers, 3, generator=gen) < 0.2, -1, blocks)
    return OpInputs(timed)


def _run(
    rule: SparseRule, op: Callable[..., Tensor], inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]
) -> Tensor:
    (q, k, v), _ = masked(inputs, segments, options)
    marked = inputs.timed.get("marked")
    held = hold(None, {"k": k, "v": v, **({} if marked is None else {"marked": marked})}, segments)
    return op(
        q, held.data["k"], held.data["v"], held.places, rule, marked=held.data.get("marked"), blocks=inputs.timed.get("blocks")
    )


CASES: tuple[OpCase, ...] = tuple(
    OpCase(
        "block_sparse_attention", name, partial(_draw, marked, choosers), sizes={"head_dim": 4, "v_dim": 3},
        causal=rule.causal, run=partial(_run, rule),
    )
    for name, rule, marked, choosers in (
        ("window", SparseRule(window=3), False, 0),
        ("dilated, both ways", SparseRule(causal=False, window=2, dilation=3), False, 0),
        ("near, first and last blocks, both ways", SparseRule(block=3, causal=False, near=2, first=1, last=1), False, 0),
        ("summaries, stride", SparseRule(block=4, near=1, summary=1, stride=5), False, 0),
        ("window, marked keys", SparseRule(window=2), True, 0),
        ("chosen blocks", SparseRule(block=3), False, 1),
        ("blocks that key heads choose, own block", SparseRule(block=3, near=1), False, 2),
    )
)
