"""A span of ``wkv``: sums up to each token of a chunk by doubling, and the walk of the state over chunks.

Axes: b batch, t time, n chunks, l places of a chunk, c channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.documents import state_dtype
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.spans import chunk_length, chunks_at_once, power_of_two
from hybridtf.ops.wkv.sums import LOW, Sums, merged, shifted


class _Places(NamedTuple):
    """Of the tokens of chunks (b n l 1): ``real``; ``upto``, how many real ones there are up to and with each; ``ids``, their
    documents, and ``before`` (b n 1 1), the one that a chunk's incoming state has (both None without documents)."""

    real: Tensor
    upto: Tensor
    ids: Tensor | None
    before: Tensor | None


def span_length(call: Call) -> int:
    """Tokens of a span: as many chunks as keep its tensors within a budget."""
    k: Tensor = call["k"]
    size: int = power_of_two(call["chunk_size"])
    return size * chunks_at_once(k.shape[0] * k.shape[2] * size, k.device)


def span(call: Call, state: States) -> tuple[Tensor, States]:
    """y (b t c) and num, den, max (b c) after a span."""
    dtype = state_dtype(call["k"], call["v"], call["log_w"], call["u"])
    log_w, u = call["log_w"].to(dtype).clamp(min=-1e30), call["u"].to(dtype)  # -inf times no token would be NaN
    size = chunk_length(call["chunk_size"], call.n_tokens)
    keys, values, places = _in_chunks(call, size, dtype)
    weight = places.real.to(dtype).expand_as(keys)
    upto = _upto(Sums(values, weight, torch.where(places.real, keys, LOW)), log_w, places)
    incoming, last = _walk(upto, log_w, places, Sums(*state))
    old = shifted(incoming, (places.upto - places.real.to(dtype)) * log_w, _same(places.ids, places.before))
    seen = merged(old, _before(upto, places), Sums(values, torch.ones_like(keys), keys + u))
    y = (seen.num / seen.den).flatten(1, 2)[:, : call.n_tokens]
    return y.to(call["v"].dtype), tuple(last)


def _upto(sums: Sums, log_w: Tensor, places: _Places) -> Sums:
    """(b n l c) the sum of a chunk's tokens up to and with each, of its document."""
    size = 1
    while size < sums.num.shape[2]:
        first, second = zip(*(_halves(z, size) for z in sums), strict=True)
        total = Sums(*(z[:, :, :, -1:] for z in first))
        upto = _halves(places.upto, size)
        same = None if places.ids is None else _same(_halves(places.ids, size)[1], _halves(places.ids, size)[0][:, :, :, -1:])
        joined = merged(shifted(total, (upto[1] - upto[0][:, :, :, -1:]) * log_w, same), Sums(*second))
        sums = Sums(*(torch.stack([a, b], 3).flatten(2, 4) for a, b in zip(first, joined, strict=True)))
        size *= 2
    return sums


def _halves(z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(b n l c) in blocks of 2 size: their first and second halves, (b n l/(2 size) size c)."""
    first, second = z.unflatten(2, (-1, 2, size)).unbind(3)
    return first, second


def _same(ids: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if ids is None or other is None else ids == other


def _before(upto: Sums, places: _Places) -> Sums:
    """What a token finds of its own chunk: the sums up to the one before it, of its document."""
    num, den = (F.pad(z[:, :, :-1], (0, 0, 1, 0)) for z in (upto.num, upto.den))
    top = F.pad(upto.max[:, :, :-1], (0, 0, 1, 0), value=LOW)
    if places.ids is not None:
        same = F.pad(places.ids[:, :, 1:] == places.ids[:, :, :-1], (0, 0, 1, 0), value=False)
        top = torch.where(same, top, LOW)
    return Sums(num, den, top)


def _walk(upto: Sums, log_w: Tensor, places: _Places, state: Sums) -> tuple[Sums, Sums]:
    """The states before each chunk (b n 1 c), and the one after the last (b c)."""
    steps = (places.upto[:, :, -1] * log_w).unbind(1)
    same: Sequence[Tensor | None] = [None] * len(steps)
    if places.ids is not None and places.before is not None:
        same = (places.ids[:, :, -1] == places.before[:, :, 0]).unbind(1)
    before = []
    for i, total in enumerate(zip(*(z[:, :, -1].unbind(1) for z in upto), strict=True)):
        before.append(state)
        state = merged(shifted(state, steps[i], same[i]), Sums(*total))
    return Sums(*(torch.stack(z, 1)[:, :, None] for z in zip(*before, strict=True))), state


def _in_chunks(call: Call, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, _Places]:
    """Keys and values (b n l c), zeros at pads and in what fills the last chunk, and their places."""
    masks, n_tokens = call.masks, call.n_tokens
    missing = -n_tokens % size
    real = torch.ones(1, n_tokens, 1, dtype=torch.bool, device=call["k"].device) if masks is None else masks.real[..., None]

    def chunked(x: Tensor) -> Tensor:
        chunks: Tensor = F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, size))
        return chunks

    given = [call["k"], call["v"]] if masks is None else [x.masked_fill(~real, 0) for x in (call["k"], call["v"])]
    keys, values = (chunked(x.to(dtype)) for x in given)
    real = chunked(real)
    ids = before = None
    if masks is not None:
        flat = torch.cat([masks.ids, masks.ids[:, -1:].expand(-1, missing)], 1)
        ids = flat.unflatten(1, (-1, size))[..., None]
        before = torch.cat([masks.before[:, None], ids[:, :-1, -1, 0]], 1)[..., None, None]
    return keys, values, _Places(real, real.to(dtype).cumsum(2), ids, before)
