"""Floating-point operations of a call, counted by torch with formulas for what torch does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count_flops(fn: Callable[[], object]) -> int:
    """Operations of the matrix products, convolutions and attention that ``fn`` runs, backward included.

    A multiplication and an addition count as two. Elementwise work is not counted. Causal attention in one
    kernel counts as if every query saw every key, as is usual: for long rows that is up to twice what was computed.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with counter:
        fn()
    return int(counter.get_total_flops())


def _formulas() -> dict[Any, Any]:
    # torch has none for its CPU attention and would count it as nothing.
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
    }


def _sdpa_forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, _as_many_heads(key, query), _as_many_heads(value, query)))


def _sdpa_backward(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(
        sdpa_backward_flop_count(grad_out, query, _as_many_heads(key, query), _as_many_heads(value, query))
    )


def _as_many_heads(shape: Any, query: Any) -> tuple[int, ...]:
    # Grouped heads: each query head multiplies with a key head, however many share it.
    return (shape[0], query[1], *shape[2:])
