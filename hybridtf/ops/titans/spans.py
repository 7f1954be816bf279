"""A span of ``titans``: the weights of all pairs of tokens for all its chunks at once, then the chunks in turn. README.md has
the derivation.

Axes: b batch, c chunks of a span, h heads, l places in a chunk (as many as a mini-batch has), k and v widths, n numbers of a
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.exponential import exp
from hybridtf.ops.mini_batches import in_chunks, numbers
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.titans.memory import Layers, gradient, join, layer_shapes, split


class Chunk(NamedTuple):
    """A chunk, (b*h ...), or all of a span with one more axis c in front. Weights are of M_t, the memory after each token."""

    q: Tensor  # (l k)
    k: Tensor  # (l k)
    v: Tensor  # (l v)
    of_memory: Tensor  # (l 1) the weight in M_t of the memory before the chunk; of M0 where a document has begun since
    of_momentum: Tensor  # (l 1) of the momentum before the chunk
    of_gradients: Tensor  # (l l) of each token's gradient, with a minus sign
    keeps_momentum: Tensor  # (1 1) the weight of the momentum before the chunk in that after it
    adds_momentum: Tensor  # (1 l) of each token's gradient in it, with a minus sign


class Mixed(NamedTuple):
    """The mini-batches that a chunk's tokens belong to: the one of its first token; the next, where that is of the state's
    document; others, of documents that begin in the chunk. (b*h ...), or one more axis c in front."""

    keeps: Tensor  # (1 1) bool: the chunk's first token goes on with the state's document
    carried: Tensor  # (l 1) 1 for tokens of that document, 0 for others
    second: Tensor  # (l 1) bool
    fresh: Tensor  # (l 1) bool: the document began in the chunk, after its first token
    closes: Tensor  # (1 l) bool: the token that ends the first mini-batch
    last_first: Tensor  # (1 1) bool: the last mini-batch is the first
    last_second: Tensor  # (1 1) bool: it is the second
    last_whole: Tensor  # (1 1) bool: it ends in the chunk


class Memory(NamedTuple):
    """The state inside a span: whole memories, M0 included, layer by layer, each (b*h in out)."""

    M: Layers
    S: Layers
    base: Layers


def span(call: Call, state: States) -> tuple[Tensor, States]:
    """y (b l h v), and after it what the memory has beyond M0, its momentum, and the memory of the mini-batch's start as the
    first; all (b h n)."""
    t, m, (b, h, n) = call.n_tokens, call["mini_batch"], state[0].shape
    shapes = layer_shapes(call["k"].shape[3], call["v"].shape[3], call["depth"], call["d_hidden"])
    first = call["M0"].to(state[0].dtype).expand(b, h, n)
    M, S, base = (split(x.flatten(0, 1), shapes) for x in (state[0] + first, state[1], state[2] + first))
    now, M0, out = Memory(M, S, base), split(first.flatten(0, 1), shapes), []
    chunks, mixed = _load(call, state[0].dtype)
    flags = None if mixed is None else list(zip(*(x.unbind(0) for x in mixed), strict=True))
    for i, parts in enumerate(zip(*(x.unbind(0) for x in chunks), strict=True)):
        if flags is None:
            y, now = _aligned(Chunk(*parts), now, closes=(i + 1) * m <= t)
        else:
            y, now = _mixed(Chunk(*parts), Mixed(*flags[i]), now, M0, documents=call.masks is not None)
        out.append(y)
    y = torch.stack(out).unflatten(1, (b, h)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :t]
    M_flat, S_flat, base_flat = (join(x).view(b, h, n) for x in now)
    return y.to(call["v"].dtype), (M_flat - first, S_flat, base_flat - first)


def _aligned(x: Chunk, now: Memory, *, closes: bool) -> tuple[Tensor, Memory]:
    """A chunk that is a mini-batch, or the start of one: y (l v), and the state after it."""
    inputs, deltas = gradient(now.M, x.k, x.v)
    y = _answers(x, now, inputs, deltas, None)
    M, S = _after(x, now.M, now.S, inputs, deltas)
    return y, Memory(M, S, M if closes else now.M)


def _mixed(x: Chunk, on: Mixed, now: Memory, M0: Layers, *, documents: bool) -> tuple[Tensor, Memory]:
    """A chunk with mini-batches that begin anywhere, and documents too where there are ``documents``: the same."""
    if documents:
        now = _begun(on.keeps, now, M0)
    M, S, base = now
    inputs, deltas = gradient(base, x.k, x.v)
    ended = _at(on.closes, x, M, S, inputs, deltas)
    for where, memory in ((on.second, ended), (on.fresh, M0)) if documents else ((on.second, ended),):
        others = gradient(memory, x.k, x.v)
        inputs[1:] = [torch.where(where, new, old) for new, old in zip(others[0][1:], inputs[1:], strict=True)]
        deltas = [torch.where(where, new, old) for new, old in zip(others[1], deltas, strict=True)]
    y = _answers(x, now, inputs, deltas, (on.carried, M0) if documents else None)
    if documents:
        carried = on.carried[..., -1:, :] > 0
        M = [torch.where(carried, old, new) for old, new in zip(M, M0, strict=True)]
        base = [torch.where(on.last_first, old, new) for old, new in zip(base, M0, strict=True)]
    M, S = _after(x, M, S, inputs, deltas)
    base = [torch.where(on.last_second, new, old) for old, new in zip(base, ended, strict=True)]
    return y, Memory(M, S, [torch.where(on.last_whole, new, old) for old, new in zip(base, M, strict=True)])


def _begun(keeps: Tensor, now: Memory, M0: Layers) -> Memory:
    """The state, forgotten where a chunk's first token begins a document."""
    M, base = ([torch.where(keeps, old, new) for old, new in zip(x, M0, strict=True)] for x in (now.M, now.base))
    return Memory(M, [layer.masked_fill(~keeps, 0) for layer in now.S], base)


def _answers(
    x: Chunk, now: Memory, inputs: Layers, deltas: Layers, split_by: tuple[Tensor, Layers] | None
) -> Tensor:
    """What the memory after each token makes of that token's query, without that memory ever being written down.

    ``split_by``: 1 (l 1) for tokens of the state's document, 0 for others, and M0, which those begin with.
    """
    rows = x.q
    for i, (M, S, x_i, d_i) in enumerate(zip(now.M, now.S, inputs, deltas, strict=True)):
        rows = rows if i == 0 else F.gelu(rows)
        old = x.of_memory * rows
        made = torch.baddbmm(torch.bmm(old if split_by is None else old * split_by[0], M), x.of_momentum * rows, S)
        if split_by is not None:
            made = torch.baddbmm(made, old * (1 - split_by[0]), split_by[1][i])
        rows = torch.baddbmm(made, torch.bmm(rows, x_i.mT) * x.of_gradients, d_i)
    return rows


def _at(place: Tensor, x: Chunk, M: Layers, S: Layers, inputs: Layers, deltas: Layers) -> Layers:
    """The memory after the token at ``place`` (1 l: one True) of the state's document; zeros where there is none."""
    weights = [torch.bmm(place.to(of.dtype), of) for of in (x.of_memory, x.of_momentum, x.of_gradients)]
    return [_moved(weights, *parts) for parts in zip(M, S, inputs, deltas, strict=True)]


def _after(x: Chunk, M: Layers, S: Layers, inputs: Layers, deltas: Layers) -> tuple[Layers, Layers]:
    """Memory and momentum after the chunk; ``M`` is what the last token's document had before it, or M0."""
    weights = [of[..., -1:, :] for of in (x.of_memory, x.of_momentum, x.of_gradients)]
    memory = [_moved(weights, *parts) for parts in zip(M, S, inputs, deltas, strict=True)]
    momentum = [
        torch.baddbmm(x.keeps_momentum * layer, (x.adds_momentum.mT * rows).mT, d)
        for layer, rows, d in zip(S, inputs, deltas, strict=True)
    ]
    return memory, momentum


def _moved(weights: Sequence[Tensor], M: Tensor, S: Tensor, rows: Tensor, deltas: Tensor) -> Tensor:
    """A layer (in out) by one token's weights: of the memory (1 1), the momentum (1 1) and the gradients (1 l)."""
    of_memory, of_momentum, of_gradients = weights
    return torch.baddbmm(torch.addcmul(of_memory * M, of_momentum, S), (of_gradients.mT * rows).mT, deltas)


def _load(call: Call, dtype: torch.dtype) -> tuple[Chunk, Mixed | None]:
    """The chunks of a span, and what their tokens belong to (None: each chunk is a mini-batch)."""
    m, masks, heads = call["mini_batch"], call.masks, call["k"].shape[2]
    one = call["place"].detach() >= 0
    real, starts = (in_chunks(x, m) for x in ((one, ~one) if masks is None else (masks.real, masks.starts)))

    def load(name: str) -> Tensor:
        """(c b h l ...), zero at pads."""
        part = in_chunks(call[name].to(dtype), m)
        if masks is not None:
            part = part.masked_fill(~real.view(*real.shape, *[1] * (part.ndim - 3)), 0)
        return part.transpose(2, 3)

    weights = _weights(load("theta"), load("log_eta"), load("log_a"), real[:, :, None], starts.cumsum(-1)[:, :, None])
    chunk = Chunk(*(x.flatten(1, 2) for x in (load("q"), load("k"), load("v"), *weights)))
    if call["aligned"]:
        return chunk, None
    mixed = _mixture(in_chunks(call["place"].detach(), m), real, starts, m)
    return chunk, Mixed(*(x[:, :, None].expand(-1, -1, heads, -1, -1).flatten(1, 2) for x in mixed))


def _weights(theta: Tensor, log_eta: Tensor, log_a: Tensor, real: Tensor, document: Tensor) -> Sequence[Tensor]:
    """Those of :class:`Chunk`, from gates (c b h l), True at real tokens and each token's document, counted from the state's, 0
    (c b 1 l). Gates are 0 at pads. All are products and sums of factors of at most 1 (and theta)."""
    hidden = document[..., :, None] != document[..., None, :]
    kept, passed = _products(log_a, hidden), _products(log_eta, hidden)
    before = document == 0
    # At a pad no momentum is added to the memory.
    sums = kept * real[..., None, :]
    momentum = log_eta.double().cumsum(-1).exp().to(theta.dtype).masked_fill(~before, 0)[..., None]
    memory = _since_start(log_a, document)[..., None]
    of_gradients = (sums @ passed) * -theta[..., None, :]
    return memory, sums @ momentum, of_gradients, momentum[..., -1:, :], passed[..., -1:, :] * -theta[..., None, :]


def _products(log: Tensor, hidden: Tensor) -> Tensor:
    """(... l l) the product of factors after one place (the last axis) up to another, 0 above the diagonal and where hidden.
    Only exponents of at most 0 are raised."""
    total = log.double().cumsum(-1)
    seen = torch.ones_like(hidden, dtype=log.dtype).tril() * ~hidden
    return exp((total[..., :, None] - total[..., None, :]).to(log.dtype) * seen) * seen


def _since_start(log: Tensor, document: Tensor) -> Tensor:
    """(... l) the product of all factors of a token's document up to it, within the chunk."""
    total = F.pad(log.double().cumsum(-1), (1, 0))
    begins = F.pad(document[..., 1:] != document[..., :-1], (1, 0), value=True)
    steps = torch.arange(document.shape[-1], device=log.device)
    at = torch.where(begins, steps, 0).cummax(-1).values
    return (total[..., 1:] - total.gather(-1, at.expand_as(log))).clamp(max=0).exp().to(log.dtype)


def _mixture(place: Tensor, real: Tensor, starts: Tensor, m: int) -> Sequence[Tensor]:
    """The fields of :class:`Mixed`, (c b ...), from places, True at real tokens and where documents begin, all (c b l)."""
    x = numbers(place, real, starts, m)
    document, end = starts.cumsum(-1), x.of[..., -1:]
    inside = (x.of == 1) & x.carried
    fresh = (x.of > 0) & ~x.carried
    last_whole = ((x.of == end) & x.ends).any(-1, keepdim=True)
    closes = (x.of == 0) & x.ends
    last_second = (end == 1) & x.carried[..., -1:]
    columns = (document == 0).to(torch.int64), inside, fresh
    rows = (x.keeps, end == 0, last_second, last_whole)
    keeps, last_first, last_second, last_whole = (flag[..., None] for flag in rows)
    carried, second, fresh = (flag[..., None] for flag in columns)
    return keeps, carried, second, fresh, closes[..., None, :], last_first, last_second, last_whole
