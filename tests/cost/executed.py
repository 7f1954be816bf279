"""A count of operations that shares nothing with the library's: every operator that really runs, seen from inside our own
operators too, by formulas written here from shapes. Elementwise work counts as nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


def product(*shapes: torch.Size) -> int:
    """Two for each multiplication and addition of a batch of matrix products."""
    a, b = shapes
    return 2 * math.prod(a) * b[-1]


class Executed(TorchDispatchMode):
    """``flops``: what ran inside, but for the bodies of the operators ``closed``."""

    def __init__(self, closed: frozenset[str]) -> None:
        super().__init__()
        self.closed = closed
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if func.namespace == "hybridtf" and name.removesuffix("_backward") in self.closed:
            return func(*args, **kwargs)
        if func.namespace == "hybridtf":  # its body, in view of this counter
            with self:
                return OPDEFS[f"hybridtf::{name}"]._init_fn(*args, **kwargs)
        if func.namespace == "aten":
            with self:  # a composite one, met below autograd, is what it is made of
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        self.flops += self._of(name, args, out)
        return out

    def _of(self, name: str, args: Any, out: Any) -> int:
        s = [x.shape if isinstance(x, Tensor) else x for x in args]
        if name in ("mm", "bmm"):
            return product(s[0], s[1])
        if name in ("addmm", "baddbmm", "addmm_", "baddbmm_"):
            return product(s[1], s[2])
        if name == "mv":
            return 2 * math.prod(s[0])
        if name == "linalg_solve_triangular":
            return math.prod(s[1]) * s[0][-1]
        if name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
            real = out if name == "_fft_c2r" else args[0]
            n = math.prod(real.shape[d] for d in args[1])
            return int((5 if name == "_fft_c2c" else 2.5) * real.numel() * math.log2(n))
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            b, h, t, k = s[0]
            return 2 * b * h * t * s[1][2] * (k + s[2][3])
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            b, h, t, k = s[1]
            return 2 * b * h * t * s[2][2] * (3 * k + 2 * s[3][3])
        if name == "mkldnn_rnn_layer":
            return 2 * s[0][0] * s[0][1] * (math.prod(s[1]) + math.prod(s[2]))
        if name == "mkldnn_rnn_layer_backward":
            return 4 * s[0][0] * s[0][1] * (math.prod(s[1]) + math.prod(s[2]))
        return 0
