"""Operations of the blockwise form, since a counter sees no products inside an operator: of the pairs in the tiles that are
visited, and, as the useful ones, of those alone that a query sees.

Axes: b batch, t queries, s keys, h heads, k key dim, v value dim, r rank of a learned bias, e its distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, shape_wrapper

from hybridtf.ops.flop_formulas import causal_pairs, is_real, register_useful

_FORWARD, _BACKWARD = (1, 1, 1), (3, 2, 3)
"""Products with keys, with values, and of a learned bias. Forward: scores, output, bias. Backward: scores again and the
gradients of weights, values, queries and keys; the bias again and its two gradients."""


def register_formulas(call_of: Callable[[tuple[Any, ...]], Any]) -> None:
    """``call_of`` makes of the operator's inputs the call that knows its tiles."""
    operators = (torch.ops.hybridtf.attention_blockwise, torch.ops.hybridtf.attention_blockwise_backward)
    for operator, times, skip in zip(operators, (_FORWARD, _BACKWARD), (0, 3), strict=True):
        _register(operator, call_of, times, skip)


def _register(operator: Any, call_of: Callable[[tuple[Any, ...]], Any], times: tuple[int, int, int], skip: int) -> None:
    """``skip``: arguments before the inputs of the forward."""

    def visible(*shapes: Any, **more: Any) -> int:
        inputs = shapes[skip:]
        return _products(inputs[0], inputs[2], inputs[13], _visible(inputs), times)

    by_shapes = shape_wrapper(visible)

    def visited(*given: Any, **more: Any) -> int:
        inputs = given[skip:]
        if not all(x is None or is_real(x) for x in inputs[3:8]):  # ids and positions decide which tiles there are
            return int(by_shapes(*given))
        call = call_of(inputs)
        tiles = [(q0, q1, k0, k1) for q0, q1, needed in call.tiles() for _, k0, k1, _ in needed]
        pairs = sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in tiles)
        bank = None if inputs[13] is None else inputs[13].shape
        return _products(call.q.shape, call.v.shape, bank, pairs, times)

    register_flop_formula(operator, get_raw=True)(visited)
    register_useful(operator, visible)


def _products(
    q: Sequence[int], v: Sequence[int], bank: Sequence[int] | None, pairs: int, times: tuple[int, int, int]
) -> int:
    """Two for a multiplication and an addition; ``pairs`` of queries and keys of one row, ``bank`` (r e)."""
    b, t, h, width = q
    bias = 0 if bank is None else times[2] * t * bank[0] * bank[1]
    return 2 * b * h * ((times[0] * width + times[1] * v[3]) * pairs + bias)


def _visible(inputs: Sequence[Any]) -> int:
    """Pairs of a row as if it were one document without a prefix, its queries the last ones of its keys."""
    t, s = int(inputs[0][1]), int(inputs[1][1])
    causal, window = inputs[15], inputs[16]
    if causal and t <= s:
        return causal_pairs(t, s, window)
    if window is None or causal or t > s:
        return t * s
    return min(2 * causal_pairs(t, s, window) - t, t * s)
