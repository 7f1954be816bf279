"""A linear recurrence over the places of one chunk by halving, in place: 3 log2(places) calls, products of decays included.

Axes: l places, time first; whatever follows is elementwise. README.md has the derivation.
"""

from __future__ import annotations

from torch import Tensor


def products(a: Tensor) -> list[Tensor]:
    """``a`` (l ...), then the products of its neighbours in pairs, of those in pairs, and so on down to one place."""
    levels = [a]
    while (half := levels[-1].shape[0] // 2) > 0:
        a = levels[-1]
        levels.append(a[1 : 2 * half : 2] * a[0 : 2 * half : 2])
    return levels


def scan_(levels: list[Tensor], h: Tensor) -> None:
    """h_i = u_i + a_i h_{i-1} in place of u (l ...): ``levels`` are the :func:`products` of a, and a_0 is not read."""
    parts = [h]
    for a in levels[:-1]:
        u = parts[-1]
        u[1::2].addcmul_(a[1::2], u[: u.shape[0] // 2 * 2 : 2])
        parts.append(u[1::2])
    for a, u in zip(levels[-2::-1], parts[-2::-1], strict=True):
        u[2::2].addcmul_(a[2::2], u[1:-1:2])


def scan_back_(levels: list[Tensor], p: Tensor) -> None:
    """p_i = w_i + a_i p_{i+1} in place of w (l ...), from the same levels; the last a is not read."""
    parts = [p]
    while parts[-1].shape[0] > 1:
        a, w = levels[len(parts) - 1], parts[-1]
        half = w.shape[0] // 2
        w[: 2 * half : 2].addcmul_(a[: 2 * half : 2], w[1::2])
        parts.append(w[::2])
    for a, w in zip(levels[: len(parts) - 1][::-1], parts[-2::-1], strict=True):
        some = (w.shape[0] - 1) // 2
        w[1 : 2 * some : 2].addcmul_(a[1 : 2 * some : 2], w[2::2])
