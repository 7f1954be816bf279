"""exp of exponents that may be far below zero: decays, and scores of what is hidden.

On a CPU two things make such factors slow in float32. torch takes exp from a vector library that leaves its fast path where a
result is no normal number: 2^19 exponents take 0.14 ms, the same with half of them -inf 2.9, at -1000 4.8, at -95 11.5; exp2
takes 0.14 of any (torch 2.13 with MKL, one core of a Xeon). And a matrix product with numbers below 2^-126 in it, or
with products that end there, takes several times as long as one without. So exp(x) is 2^(x log2 e) there, and 0 below 2^-126.
The rounded product makes a relative error of at most abs(x) 2^-24, as much as x has from its own rounding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2_E = math.log2(math.e)
LEAST = -126
"""Exponents of 2 below it count as -inf: the least normal number. A higher bound would spare more products, but a weighted mean
of tokens that are all far away would lose its weights."""


def exp(x: Tensor) -> Tensor:
    """exp(x), differentiable; see the module."""
    return torch.exp2(F.threshold(x * LOG2_E, LEAST, -math.inf)) if _by_two(x) else x.exp()


def exp_(x: Tensor) -> Tensor:
    """:func:`exp` in place."""
    return F.threshold(x.mul_(LOG2_E), LEAST, -math.inf, inplace=True).exp2_() if _by_two(x) else x.exp_()


def factors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors of at least 0, computed in float64, in ``dtype``: without those that :func:`exp` leaves out. Not for an ``x`` of
    float32, which would be changed in place."""
    x = x.to(dtype)
    return F.threshold(x, 2.0**LEAST, 0.0, inplace=True) if _by_two(x) else x


def _by_two(x: Tensor) -> bool:
    """Elsewhere exp is as fast, and float64 is asked for its digits."""
    return x.dtype == torch.float32 and x.device.type == "cpu"
