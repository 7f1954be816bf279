"""A count of operations that shares nothing with the library's: every operator that really runs, seen from inside our own
operators too, by formulas written here from shapes. Elementwise work counts as nothing but inside the scans, which are made of
it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def product(*shapes: torch.Size) -> int:
    """Two for each multiplication and addition of a batch of matrix products."""
    a, b = shapes
    return 2 * math.prod(a) * b[-1]


@functools.cache
def kernel_pairs(t: int, s: int, causal: bool) -> int:
    """Pairs of a query and a key that the attention kernel of torch's CPU computes, masked ones too, asked of the kernel: every
    key has a value of its own that is not a number, and even a weight of zero hands it on."""
    if not causal:
        return t * s
    q, k = torch.ones(1, 1, t, t), torch.ones(1, 1, t, t)
    with _disable_current_modes(), torch.no_grad():
        v = torch.diag(torch.full((t,), torch.nan))[None, None]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return int(y.isnan().sum())


SCANS = ("linear_scan", "selective_scan_chunked")
"""Ops that are made of elementwise work."""

ONE_EACH = ("add", "sub", "mul", "exp", "cos", "sin")


class Executed(TorchDispatchMode):
    """``flops``: what ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scanning = False
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if func.namespace == "hybridtf":  # its body, in view of this counter
            self.scanning = name.removesuffix("_backward") in SCANS
            with self:
                out = OPDEFS[f"hybridtf::{name}"]._init_fn(*args, **kwargs)
            self.scanning = False
            return out
        if func.namespace == "aten":
            with self:  # a composite one, met below autograd, is what it is made of
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        self.flops += self._of(name, args, out) + (self._of_elements(name.rstrip("_"), args, out) if self.scanning else 0)
        return out

    def _of_elements(self, name: str, args: Any, out: Any) -> int:
        if name in ("sum", "prod"):  # a complex product: four and two
            return args[0].numel() * (6 if args[0].is_complex() else 1)
        return out.numel() * (2 if name == "addcmul" else 1 if name in ONE_EACH else 0) if isinstance(out, Tensor) else 0

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
            return 2 * b * h * kernel_pairs(t, s[1][2], len(s) > 4 and s[4]) * (k + s[2][3])
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            b, h, t, k = s[1]
            return 2 * b * h * kernel_pairs(t, s[2][2], s[7]) * (3 * k + 2 * s[3][3])
        if name == "mkldnn_rnn_layer":
            return 2 * s[0][0] * s[0][1] * (math.prod(s[1]) + math.prod(s[2]))
        if name == "mkldnn_rnn_layer_backward":
            return 4 * s[0][0] * s[0][1] * (math.prod(s[1]) + math.prod(s[2]))
        return 0
