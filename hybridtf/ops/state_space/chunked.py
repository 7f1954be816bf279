"""``state_space`` by chunks in matrix products, in time and memory linear in the length. README.md has the derivation.

Axes: b batch, t time, c channels, s real numbers of a state, l tokens of a chunk, i and j places in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.passes_op import Call, Masks, States
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once
from hybridtf.ops.state_space.shapes import Number, as_given, check, start_joined
from hybridtf.ops.state_space.step import state_space_step
from hybridtf.ops.state_space.tables import tables


def state_space_chunked(
    u: Tensor, *, b: Number, c: Number, log_a: Number | None = None, a: Tensor | None = None,
    initial_state: Number | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Number]:
    """The system of :func:`state_space_reference` without a loop over time; same arguments, results and errors.

    States and sums are float32 at least, tables of powers are made in float64. The backward computes each chunk again.
    Second derivatives raise :class:`KernelError`: the reference has them.
    """
    system = check(u, b, c, log_a, a, initial_state, segments, chunk_size)
    state = start_joined(u, system, initial_state, segments)
    with no_autocast(u.device):
        if u.shape[1] == 1:
            y, last = state_space_step(u, system, state, segments)
            return y, as_given(last, system)
        made = tables(system, chunk_size, state.dtype)
        given, order = _compact(mask_pads(u, segments), segments)
        y, (last,) = _OP((given,), made, (), None if order is None else order.segments, (state,))
    if order is not None:
        y = torch.zeros_like(y).scatter(1, order.index[..., None].expand_as(y), y)
    return y, as_given(last, system)


class _Order:
    """Columns with each row's pads moved behind its tokens."""

    def __init__(self, segments: Segments) -> None:
        self.index = torch.argsort((~segments.real).to(torch.int8), dim=1, stable=True)  # [b, t]
        self.segments = Segments(segments.ids.gather(1, self.index), segments.continues)


def _compact(u: Tensor, segments: Segments | None) -> tuple[Tensor, _Order | None]:
    if segments is None:
        return u, None
    order = _Order(segments)
    return u.gather(1, order.index[..., None].expand_as(u)), order


def _span(call: Call, state: States) -> tuple[Tensor, States]:
    """Some chunks. Pads stand behind a row's tokens."""
    (h,) = state
    size, n, masks = call["reads"].shape[1], call.n_tokens, call.masks
    # On a CPU it is cheap to see that no document begins or ends here. Elsewhere looking would make the host wait.
    whole = masks is None or (h.device.type == "cpu" and bool(masks.real.all()) and not bool(masks.starts.any()))
    done, parts = 0, []
    if whole and n >= size:
        done = n - n % size
        y, h = _side_by_side(call.cut(0, done), h)
        parts.append(y)
    for start in range(done, n, size):
        y, h = _chunk(call.cut(start, min(start + size, n)), h)
        parts.append(y)
    return torch.cat(parts, 1), (h,)


def _side_by_side(call: Call, h: Tensor) -> tuple[Tensor, Tensor]:
    """Full chunks of one document a row: products for all of them at once, then their states in order."""
    reads, writes, powers = call["reads"], call["writes"], call["powers"]
    size, b = reads.shape[1], h.shape[0]
    k = call.n_tokens // size
    u = call["u"].to(h.dtype).unflatten(1, (k, size))  # [b, k, l, c]
    inputs = u.permute(3, 2, 1, 0).flatten(2)  # [c, l, k b]
    sums = (writes.flip(1).mT @ inputs).unflatten(2, (k, b)).permute(2, 3, 0, 1)  # [k, b, c, s]
    hop = _hop(powers, size)
    entering = []
    for written in sums.unbind(0):
        entering.append(h)
        h = hop(h) + written
    held = reads @ torch.stack(entering).permute(2, 3, 0, 1).flatten(2)
    y = (call["pairs"] @ inputs + held).unflatten(2, (k, b)).permute(3, 2, 1, 0)  # [b, k, l, c]
    return y.flatten(1, 2), h


def _hop(powers: Tensor, length: int) -> Callable[[Tensor], Tensor]:
    """A^length h as a function of h (b c s)."""
    if powers.ndim == 4:
        return lambda h: torch.einsum("bcm,cnm->bcn", h, powers[-1])
    size = (powers[0] * length).exp()
    if len(powers) == 1:
        return lambda h: (h * size).to(h.dtype)
    re, im = size * (powers[1] * length).cos(), size * (powers[1] * length).sin()

    def turned(h: Tensor) -> Tensor:
        x, y = h.chunk(2, dim=-1)
        return torch.cat([re * x - im * y, re * y + im * x], -1).to(h.dtype)

    return turned


def _chunk(call: Call, h: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk, in which documents may begin and end."""
    u, reads, writes = call["u"].to(h.dtype), call["reads"], call["writes"]
    n = u.shape[1]
    pairs, masks, powers = call["pairs"][:, :n, :n], call.masks, call["powers"]
    held = (reads[:, :n] @ h.permute(1, 2, 0)).permute(2, 1, 0)  # [b, i, c]
    if masks is None:
        inputs = u.permute(2, 1, 0)  # [c, j, b]
        y = (pairs @ inputs).permute(2, 1, 0) + held
        new = (writes[:, :n].flip(1).mT @ inputs).permute(2, 0, 1)  # [b, c, s]
        count = torch.full((u.shape[0],), n, device=u.device)
        return y, _passed(h, count, powers, reads.shape[1]) + new
    joined = (masks.ids[:, :, None] == masks.ids[:, None, :])[:, None]  # [b, 1, i, j]
    y = torch.einsum("bcij,bjc->bic", pairs * joined, u)
    y = y + held * (masks.ids == masks.before[:, None])[..., None]
    return y, _after(h, u, masks, writes, powers)


def _after(h: Tensor, u: Tensor, masks: Masks, writes: Tensor, powers: Tensor) -> Tensor:
    """The state (b c s) after a chunk in which documents end."""
    n = u.shape[1]
    count = masks.real.sum(1)
    last = masks.ids[:, -1:]
    kept = u * (masks.real & (masks.ids == last))[..., None]
    # Each row's tokens moved to the right end: then all of them are as far from it as their place says.
    source = torch.arange(n, device=u.device) - (n - count)[:, None]
    moved = kept.gather(1, source.clamp(min=0)[..., None].expand_as(kept)) * (source >= 0)[..., None]
    new = (writes[:, :n].flip(1).mT @ moved.permute(2, 1, 0)).permute(2, 0, 1)
    passed = _passed(h, count, powers, writes.shape[1]) * (last == masks.before[:, None])[..., None]
    return passed + new


def _passed(h: Tensor, count: Tensor, powers: Tensor, length: int) -> Tensor:
    """A^count h for each row, where count (b) is at most ``length``: a dense A by the binary digits of count."""
    if powers.ndim == 3:
        far = powers[:, None] * count[:, None, None]
        size = far[0].exp()
        if len(far) == 1:
            return (h * size).to(h.dtype)
        re, im = size * far[1].cos(), size * far[1].sin()
        x, y = h.chunk(2, dim=-1)
        return torch.cat([re * x - im * y, re * y + im * x], -1).to(h.dtype)
    for i, power in enumerate(powers):
        bit = (count >> i) & 1 if length >> i > 1 or length == 1 else (count == length).to(count.dtype)
        moved = torch.einsum("bcm,cnm->bcn", h, power)
        h = torch.where((bit == 1)[:, None, None], moved, h)
    return h


def _length(call: Call) -> int:
    """Tokens of a span: as many chunks as keep inputs and states within the budget."""
    b, _, c = call["u"].shape
    size: int = call["reads"].shape[1]
    width = call["reads"].shape[2]
    return size * chunks_at_once(b * c * (size + width), call["u"].device)


def _like(call: Call) -> tuple[Any, torch.dtype]:
    return call["u"].shape, call["u"].dtype


_OP = span_op(
    "state_space", _span, timed=("u",), fixed=("pairs", "reads", "writes", "powers"), options={}, length=_length, like=_like
)
