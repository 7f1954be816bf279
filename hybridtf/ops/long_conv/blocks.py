"""A causal convolution in which no result meets a later input, not even by rounding. README.md has the derivation.

Axes: m sequences, n tokens, c channels, w taps, l tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.spans import by_device

BLOCK = 32
"""Tokens of the smallest blocks, inside which the sums are taken one by one."""

# Elements that are transformed at once: a CPU's cache, and enough to fill a GPU.
BUDGET = 2**20
BUDGET_GPU = 2**26


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """x (m n c) with weight (c w), in their dtype: some channels at a time, so that what lies between stays small."""
    m, n, channels = x.shape
    budget = by_device(x.device, BUDGET, BUDGET_GPU)
    width = max(1, min(channels, budget // max(1, m * n)))
    starts = range(0, channels, width)
    parts = [_convolve(x[..., i : i + width].mT, weight[i : i + width]) for i in starts]
    return torch.cat(parts, 1).mT if parts else x


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """x (m c n)."""
    n = x.shape[-1]
    y = _inside(x, weight)
    half = BLOCK
    while half < n and weight.shape[1] > 1:
        y = y + _from_first_to_second(x, weight, half)
        half *= 2
    return y


def _inside(x: Tensor, weight: Tensor) -> Tensor:
    """What tokens of one small block give each other."""
    n = x.shape[-1]
    size = min(BLOCK, n)
    blocks = _cut(x, size)  # [m, c, k, l]
    steps = torch.arange(size, device=x.device)
    ago = steps[:, None] - steps
    taps = _taps(weight, 0, size)[:, ago.clamp(min=0)].masked_fill(ago < 0, 0)  # [c, i, j]
    y = torch.einsum("cij,mckj->mcki", taps, blocks)
    return y.flatten(2)[..., :n]


def _from_first_to_second(x: Tensor, weight: Tensor, half: int) -> Tensor:
    """What the first half of each block of 2 ``half`` tokens gives its second half, by FFT; zero in first halves.

    The transform has 2 ``half`` points: what wraps around falls on the first half of the result, which is not used.
    """
    n = x.shape[-1]
    first = _cut(x, 2 * half)[..., :half]
    taps = torch.fft.rfft(_taps(weight, 0, 2 * half), n=2 * half)[:, None]
    reached: Tensor = torch.fft.irfft(torch.fft.rfft(first, n=2 * half) * taps, n=2 * half)[..., half:]
    whole: Tensor = F.pad(reached, (half, 0)).flatten(2)[..., :n]
    return whole


def _cut(x: Tensor, size: int) -> Tensor:
    """(m c n) as (m c k size), the last one filled up with zeros."""
    blocks: Tensor = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    return blocks


def _taps(weight: Tensor, start: int, stop: int) -> Tensor:
    """Taps ``start`` to ``stop``, zero beyond the last."""
    part = weight[:, start:stop]
    return F.pad(part, (0, stop - start - part.shape[1]))


def documents(real: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents of like length together: for each power of 2, where their tokens lie in a flat (b t) and which of these
    places (documents, tokens) hold one. Reads the lengths on the host."""
    n = ids.shape[1]
    place = real.flatten().nonzero()[:, 0]
    if not len(place):
        return
    row, of = place // n, ids.flatten()[place]
    new = torch.ones_like(place, dtype=torch.bool)
    new[1:] = (row[1:] != row[:-1]) | (of[1:] != of[:-1])
    starts = new.nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([len(place)], device=place.device))
    sizes = [1 << (length - 1).bit_length() for length in lengths.tolist()]
    for size in sorted(set(sizes)):
        chosen = torch.tensor([i for i, other in enumerate(sizes) if other == size], device=place.device)
        longest = int(lengths[chosen].max())
        steps = torch.arange(longest, device=place.device)
        held = steps < lengths[chosen, None]
        yield place[(starts[chosen, None] + steps).clamp(max=len(place) - 1)], held
