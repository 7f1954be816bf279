"""Numbers as a dtype has them."""

from __future__ import annotations

import math

import torch

SIGNIFICANT = {torch.bfloat16: 8, torch.float16: 11}
"""Bits that a number has."""


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number of ``dtype`` that is nearest, of a positive one; as it is for float32 and wider."""
    bits = SIGNIFICANT.get(dtype)
    if bits is None:
        return number
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)
