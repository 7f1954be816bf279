"""Operations of sparse attention by groups: of all pairs in the groups' products, and, as the useful ones, of those that the
rule lets a query see.

Which groups there are hangs on real positions and, where a router chooses, on its choice. A plan has no choice: there every
query draws from the blocks behind it, all alike.

Axes: b batch, t queries, s keys, h heads, k key dim, v value dim, c choosers, n choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, shape_wrapper

from hybridtf.ops.block_sparse_attention.parts import PARTS, clauses_of
from hybridtf.ops.block_sparse_attention.rule import SparseRule
from hybridtf.ops.flop_formulas import is_real, register_useful


def register_formulas(call_of: Callable[[Sequence[Any]], Any]) -> None:
    """``call_of`` makes of the operator's inputs the call that knows its groups."""
    # The backward: scores again and the output again, and the two gradients of each of the two products.
    _register(torch.ops.hybridtf.block_sparse_attention, call_of, 1, 0)
    _register(torch.ops.hybridtf.block_sparse_attention_backward, call_of, 3, 2)


def _register(operator: Any, call_of: Callable[[Sequence[Any]], Any], times: int, skip: int) -> None:
    """``times`` the two products; ``skip``: arguments before the inputs of the forward."""

    def seen(*shapes: Any, **more: Any) -> int:
        return times * _by_rule(*shapes[skip:])

    by_shapes = shape_wrapper(seen)

    def grouped(*given: Any, **more: Any) -> int:
        inputs = given[skip:]
        if not all(x is None or is_real(x) for x in inputs[3:8]):  # positions and marks decide which groups there are
            return int(by_shapes(*given))
        call = call_of(inputs)
        if call.blocks is not None and not is_real(call.blocks):
            call = replace(call, blocks=_drawn(call))
        pairs: int = sum(chunk.pairs for chunk in call.chunks())
        heads: int = call.result_shape()[1]
        return times * 2 * pairs * heads * int(call.q.shape[3] + call.v.shape[3])

    register_flop_formula(operator, get_raw=True)(grouped)
    register_useful(operator, seen)


def _drawn(call: Any) -> Tensor:
    """Blocks (b t c n) that stand for a choice which is not known, the same at every call; -1 where there are fewer."""
    b, t, c, n = call.blocks.shape
    total = -(-call.k.shape[1] // call.rule.block)
    own = (call.places.position // call.rule.block)[..., None, None]
    scores = torch.rand(b, t, c, total, generator=torch.Generator().manual_seed(0))
    best = scores.masked_fill(torch.arange(total) > own, -1.0).topk(min(n, total), -1)
    return torch.nn.functional.pad(best.indices.masked_fill(best.values < 0, -1), (0, n - min(n, total)), value=-1)


def _by_rule(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any) -> int:
    """Of the two products of a forward; arguments as shapes. Every query counts as if it were far from both ends of its
    document; marked keys, of which shapes say nothing, are not counted."""
    b, t, h, width = q
    blocks, rule, part, s = rest[5], SparseRule(*rest[6]), PARTS[rest[7]], k[1]
    sides = 1 if rule.causal else 2
    keys = {
        "window": sides * (rule.window - 1) + 1, "near": (sides * (rule.near - 1) + 1) * rule.block,
        "first": rule.first * rule.block, "last": rule.last * rule.block,
        "summary": s * rule.summary // rule.block, "stride": s // max(rule.stride, 1),
        "chosen": 0 if blocks is None else blocks[3] * rule.block,
    }
    visible = sum(min(keys[name], s) for name in clauses_of(rule, part, False))
    return 2 * b * t * h * visible * (width + v[3])
