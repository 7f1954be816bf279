"""What torch's FLOP counter is told of torch's own operators that it knows no formula of.

Registered for good, so that a count inside an operator of ours sees them too. Should torch get a formula, that one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def _mv(matrix: Shape, vector: Shape, *rest: Any, **more: Any) -> int:
    return 2 * matrix[0] * matrix[1]


def _addmv(bias: Shape, matrix: Shape, vector: Shape, *rest: Any, **more: Any) -> int:
    return _mv(matrix, vector)


def _dot(a: Shape, b: Shape, *rest: Any, **more: Any) -> int:
    return 2 * a[0]


def _solve_triangular(a: Shape, b: Shape, *rest: Any, left: bool = True, **more: Any) -> int:
    """By substitution: a multiplication and an addition for each entry of the triangle and each right-hand side."""
    return math.prod(b) * a[-1]


def _complex_fft(x: Shape, dims: Sequence[int], *rest: Any, **more: Any) -> int:
    """5 n log2 n, the count of the radix-2 algorithm, by which transforms are compared."""
    n = math.prod(x[d] for d in dims)
    return int(5 * math.prod(x) * math.log2(n)) if n else 0


def _real_fft(x: Shape, dims: Sequence[int], *rest: Any, **more: Any) -> int:
    """Half of that of a complex one."""
    return _complex_fft(x, dims) // 2


def _inverse_real_fft(x: Shape, dims: Sequence[int], *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return _real_fft(out_shape, dims)


def _sdpa_forward(query: Any, key: Any, value: Any, *args: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query, _as_many_heads(key, query), _as_many_heads(value, query)))


def _sdpa_backward(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, _as_many_heads(key, query), _as_many_heads(value, query)))


def _as_many_heads(shape: Any, query: Any) -> tuple[int, ...]:
    # Grouped heads: each query head multiplies with a key head, however many share it.
    return (shape[0], query[1], *shape[2:])


_FORMULAS: dict[str, Callable[..., int]] = {
    "mv": _mv, "addmv": _addmv, "dot": _dot, "vdot": _dot, "linalg_solve_triangular": _solve_triangular,
    "_fft_c2c": _complex_fft, "_fft_r2c": _real_fft, "_fft_c2r": _inverse_real_fft,
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
}

for _name, _formula in _FORMULAS.items():
    if getattr(torch.ops.aten, _name) not in flop_registry:
        register_flop_formula(getattr(torch.ops.aten, _name))(_formula)
