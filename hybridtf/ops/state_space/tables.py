"""What a chunk of ``state_space`` multiplies with: powers of A, made once a call and differentiated by autograd.

Axes: c channels, n states, s real numbers of a state, l tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.state_space.shapes import System, read, written


class Tables(NamedTuple):
    """Products of C, powers of A, and B, for a chunk of l tokens."""

    pairs: Tensor
    """(c l l): C A^(i-j) B at [i, j], what token j gives to the result at i; 0 for j > i."""
    reads: Tensor
    """(c l s): C A^(i+1), what the incoming state gives to the result at i."""
    writes: Tensor
    """(c l s): A^k B, what a token leaves k tokens later."""
    powers: Tensor
    """How a state passes many tokens: (k c s s), A to the power 1, 2, 4, ..., l, where A is dense; else log_a, (1 c n), or
    with the phase (2 c n)."""


def tables(system: System, length: int, dtype: torch.dtype) -> Tables:
    """For chunks of ``length``, a power of 2; made in float64, given in ``dtype``."""
    wide = system.double()
    reads, writes, powers = (_dense if system.form == "dense" else _diagonal)(wide, length)
    kernel = torch.einsum("cls,cs->cl", writes, read(wide))
    steps = torch.arange(length, device=kernel.device)
    ago = steps[:, None] - steps
    pairs = kernel[:, ago.clamp(min=0)].masked_fill(ago < 0, 0)
    # A chunk takes exponentials of log_a: those keep float64.
    powers = powers.to(dtype) if system.form == "dense" else powers
    return Tables(pairs.to(dtype), reads.to(dtype), writes.to(dtype), powers)


def _dense(system: System, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """By doubling: what is known of the first k tokens, times A^k, is that of the next k."""
    power = system.a[0]
    reads, writes = torch.einsum("cn,cnm->cm", read(system), power)[:, None], written(system)[:, None]
    powers = [power]
    while reads.shape[1] < length:
        reads = torch.cat([reads, reads @ power], 1)
        writes = torch.cat([writes, writes @ power.mT], 1)
        power = power @ power
        powers.append(power)
    return reads, writes, torch.stack(powers)


def _diagonal(system: System, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """By exponentials."""
    steps = torch.arange(length + 1, device=system.a[0].device, dtype=torch.float64)[None, :, None]
    size = (system.a[0][:, None] * steps).exp()  # [c, l + 1, n]
    (b, c) = (part[0][:, None] for part in system[2:])
    if system.form == "real":
        return size[:, 1:] * c, size[:, :-1] * b, system.a[0][None]
    phase = system.a[1][:, None] * steps
    re, im = size * phase.cos(), size * phase.sin()
    b_im, c_im = (part[1][:, None] for part in system[2:])
    later, now = (re[:, 1:], im[:, 1:]), (re[:, :-1], im[:, :-1])
    reads = torch.cat([c * later[0] - c_im * later[1], -(c * later[1] + c_im * later[0])], -1)
    writes = torch.cat([b * now[0] - b_im * now[1], b * now[1] + b_im * now[0]], -1)
    return reads, writes, torch.stack(system.a)
