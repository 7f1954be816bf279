"""Angles of positions, in float64 wherever a device has it.

A float32 product of position and frequency is off by 0.06 rad at position 10^6, and a table kept in a module is spoilt by a
cast of the model: so angles are formed at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPU, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def exponents(half: int, device: torch.device) -> Tensor:
    """(half): i / half, which is 2i / width."""
    return torch.arange(half, device=device, dtype=wide_dtype(device)) / half


def powers(half: int, theta: float, device: torch.device) -> Tensor:
    """(half): theta^(-2i/width), the angle per token of each pair."""
    return theta ** -exponents(half, device)


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(b t half): positions (b t) times frequencies, (half) or (b t half)."""
    return positions.to(frequencies.dtype)[..., None] * frequencies
