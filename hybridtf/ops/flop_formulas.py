"""What torch's FLOP counter is told of torch's own operators that it knows no formula of.

Registered for good, so that a count inside an operator of ours sees them too. Should torch get a formula, that one counts.

A formula says what the operator computes. Where that is more than was asked for (masked pairs of a tile, sweeps that make a
recurrence parallel), :data:`USEFUL` has the formula of what was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula, shape_wrapper

Shape = Sequence[int]

USEFUL: dict[Any, Callable[..., int]] = {}
"""By operator, of those that compute more: the operations that were asked for. Called with the operator's arguments."""


def register_useful(operator: Any, formula: Callable[..., int]) -> None:
    """``formula`` is given the shapes of the tensors among the arguments of ``operator``."""
    USEFUL[operator] = shape_wrapper(formula)


_ELEMENTS = dict.fromkeys(("add", "sub", "rsub", "mul", "div", "neg", "exp", "sin", "cos", "tanh", "sigmoid"), 1)
_ELEMENTS |= {"addcmul": 2, "addcdiv": 2}
_REDUCTIONS = ("sum", "prod", "cumsum")


class CountElements(TorchDispatchMode):
    """``flops``: products by their formulas, and of elementwise work one for each number that an addition, a multiplication or
    a function gives (six for a product along an axis of complex ones). Copies and masks are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func._overloadpacket, kwargs or {}
        if packet not in flop_registry:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        name = packet.__name__.rstrip("_")
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif name in _ELEMENTS:
            self.flops += _ELEMENTS[name] * out.numel()
        elif name in _REDUCTIONS:
            self.flops += args[0].numel() * (6 if args[0].is_complex() and name == "prod" else 1)
        return out


def is_real(x: Tensor) -> bool:
    """Whether ``x`` has values, and not a shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def causal_pairs(t: int, s: int, window: int | None = None) -> int:
    """Pairs of the last ``t`` of ``s`` tokens with the keys up to themselves, and no further back than ``window``."""
    # The query at place p (from one) sees min(p, window) keys.
    reach = s if window is None else min(window, s)
    short = max(min(reach, s) - (s - t), 0)  # queries that see all before them
    return short * (s - t) + short * (short + 1) // 2 + (t - short) * reach


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


# -- attention in one kernel of the CPU --------------------------------------------------------------------------------


def _executed_pairs(t: int, s: int, causal: bool) -> int:
    """Of queries and keys whose products the kernel computes. It walks blocks of queries over blocks of 512 keys and leaves out
    those keys alone that come after the last query of a causal block (aten/native/cpu/FlashAttentionKernel.cpp)."""
    if not causal:
        return t * s
    rows, pairs = 256 if t >= 768 else 64 if t >= 192 else 32, 0
    for first in range(0, t, rows):
        last = min(first + rows, s)
        pairs += min(rows, t - first) * min(-(-last // 512) * 512, s)
    return pairs


def _visible_pairs(t: int, s: int, causal: bool) -> int:
    # Causal there counts from the first key.
    return causal_pairs(t, t) if causal else t * s


def _of_pairs(pairs: Callable[[int, int, bool], int], keys: int, values: int, skip: int) -> Callable[..., int]:
    """A formula: so many products with keys and with values; ``skip`` arguments before the queries, two more behind the values
    in the backward."""

    def flops(*shapes: Any, is_causal: bool = False, **more: Any) -> int:
        (b, h, t, k), (_, _, s, _), (*_, v) = shapes[skip : skip + 3]
        place = skip + (4 if not skip else 6)
        causal = bool(shapes[place]) if len(shapes) > place else is_causal
        return 2 * int(b * h) * pairs(t, s, causal) * int(keys * k + values * v)

    return flops


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

_FORMULAS: dict[str, Callable[..., int]] = {
    "mv": _mv, "addmv": _addmv, "dot": _dot, "vdot": _dot, "linalg_solve_triangular": _solve_triangular,
    "_fft_c2c": _complex_fft, "_fft_r2c": _real_fft, "_fft_c2r": _inverse_real_fft,
    # Scores, output; in the backward scores again, and the gradients of weights, values, queries and keys.
    _FLASH: _of_pairs(_executed_pairs, 1, 1, 0), f"{_FLASH}_backward": _of_pairs(_executed_pairs, 3, 2, 1),
}

for _name, _formula in _FORMULAS.items():
    if getattr(torch.ops.aten, _name) not in flop_registry:
        register_flop_formula(getattr(torch.ops.aten, _name))(_formula)

register_useful(getattr(torch.ops.aten, _FLASH), _of_pairs(_visible_pairs, 1, 1, 0))
register_useful(getattr(torch.ops.aten, f"{_FLASH}_backward"), _of_pairs(_visible_pairs, 3, 2, 1))
