"""What happens in a span of ``gla``: pairs by halves, states by chunks. README.md has the derivation.

Axes: b batch, c chunks of a span, l places in a chunk, g groups, r heads a group, n blocks of a chunk, w places in a block, k
key width, v value width, d the width of the decay (k or v).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.passes_op import Call, States


class Cut(NamedTuple):
    """How a span lies in chunks: ``chunks`` chunks of ``size`` tokens, each with room for ``room``, a power of two."""

    chunks: int
    size: int
    room: int

    def lay(self, x: Tensor, value: int = 0) -> Tensor:
        """(b t ...) to (b c l ...), with ``value`` where there is no token."""
        rest = x.shape[2:]
        x = _filled(x.flatten(2), self.chunks * self.size - x.shape[1], value).unflatten(1, (self.chunks, self.size))
        laid: Tensor = _filled(x, self.room - self.size, value).unflatten(-1, rest)
        return laid

    def join(self, y: Tensor, t: int) -> Tensor:
        """(b c l ...) back to (b t ...)."""
        return y[:, :, : self.size].flatten(1, 2)[:, :t]


def _filled(x: Tensor, more: int, value: int) -> Tensor:
    return F.pad(x, (0, 0, 0, more), value=value) if more else x


def cut_of(t: int, chunk_size: int) -> Cut:
    """Chunks over ``t`` tokens; a stretch shorter than a chunk is one of its own length."""
    size = min(t, chunk_size)
    return Cut(-(-t // size), size, 1 << (size - 1).bit_length())


class Documents(NamedTuple):
    """Which document each place of the chunks belongs to."""

    ids: Tensor
    """(b c l)"""
    before: Tensor
    """(b c) that of the state entering the chunk."""

    @property
    def last(self) -> Tensor:
        return self.ids[:, :, -1]

    def apart(self) -> Tensor:
        """(b c 1 1 l l) True where the first place may not read the second, as of another document."""
        hidden: Tensor = (self.ids[..., :, None] != self.ids[..., None, :])[:, :, None, None]
        return hidden


def documents_of(call: Call, cut: Cut) -> Documents | None:
    """None without segments. Places without a token belong to the document before them."""
    if call.masks is None:
        return None
    ids = cut.lay(call.masks.ids[..., None], value=-2).squeeze(-1)
    ids = torch.where(ids == -2, ids.amax(2, keepdim=True), ids)
    return Documents(ids, torch.cat([call.masks.before[:, None], ids[:, :-1, -1]], 1))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(... n w d) as the blocks on the left and those on the right of a pair, each (... n/2 w d)."""
    left, right = x.unflatten(-3, (-1, 2)).unbind(-3)
    return left, right


class Decays(NamedTuple):
    """Factors between 0 and 1 of blocks of w places: products of what their tokens keep."""

    until: Tensor
    """(b c g 1 n w d) from the block's start to where the place reads."""
    after: Tensor
    """(b c g 1 n w d) from the place to the block's end."""
    whole: Tensor
    """(b c g 1 n 1 d)"""

    @classmethod
    def of_tokens(cls, kept: Tensor, read_before: bool) -> Decays:
        """Blocks of one place each; ``kept`` (b c g 1 l d)."""
        each = kept.unsqueeze(-2)
        return cls(torch.ones_like(each) if read_before else each, torch.ones_like(each), each)

    def doubled(self) -> Decays:
        """Those of blocks twice as wide."""
        (until_l, until_r), (after_l, after_r), (whole_l, whole_r) = (halves(x) for x in self)
        return Decays(
            torch.cat([until_l, until_r * whole_l], -2), torch.cat([after_l * whole_r, after_r], -2), whole_l * whole_r
        )


def near(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, bonus: Tensor | None, of_keys: bool, documents: Documents | None
) -> tuple[Tensor, Decays]:
    """What each place reads of its own chunk (b c g r l v), and the decays of the whole chunk.

    q (b c g r l k); k, v, kept (b c g 1 l .); bonus (g r 1 k).
    """
    own = (q * k if bonus is None else q * k * bonus).sum(-1, keepdim=True)  # [b c g r l 1]
    decays = Decays.of_tokens(kept, bonus is not None)
    return (_near_by_keys if of_keys else _near_by_values)(q, k, v, own, decays, documents)


def _near_by_keys(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, decays: Decays, documents: Documents | None
) -> tuple[Tensor, Decays]:
    """The scores of a block are those of its halves, and those of its right half with its left."""
    scores = own.unsqueeze(-1)  # [b c g r n w w], w = 1
    while (width := scores.shape[-1]) < q.shape[-2]:
        reads = _blocks(q, width, 1) * halves(decays.until)[1]
        keys = _blocks(k, width, 0) * halves(decays.after)[0]
        left, right = halves(scores)
        scores = torch.cat([F.pad(left, (0, width)), torch.cat([reads @ keys.mT, right], -1)], -2)
        decays = decays.doubled()
    scores = scores.squeeze(-3)
    if documents is not None:
        scores = scores.masked_fill(documents.apart(), 0)
    return scores @ v, decays


def _near_by_values(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, decays: Decays, documents: Documents | None
) -> tuple[Tensor, Decays]:
    """Scores do not decay; a block's right half reads its left half's values at the border, and what it finds decays on."""
    scores = q @ k.mT  # [b c g r l l]
    if documents is not None:
        scores = scores.masked_fill(documents.apart(), 0)
    y = (own * v).unsqueeze(-2)  # [b c g r n w v], w = 1
    while (width := y.shape[-2]) < q.shape[-2]:
        values = _blocks(v, width, 0) * halves(decays.after)[0]
        pairs = scores.unflatten(-2, (-1, 2, width)).unflatten(-1, (-1, 2, width))  # [b c g r n 2 w n 2 w]
        low = pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [b c g r n w w]
        left, right = halves(y)
        y = torch.cat([left, right + (low @ values) * halves(decays.until)[1]], -2)
        decays = decays.doubled()
    return y.squeeze(-3), decays


def _blocks(x: Tensor, width: int, side: int) -> Tensor:
    """(... l d) as the blocks of ``width`` places on the left (0) or on the right (1) of a pair, (... n/2 w d)."""
    part: Tensor = x.unflatten(-2, (-1, 2, width))[..., side, :, :]
    return part


def gla_span(call: Call, states: States) -> tuple[Tensor, States]:
    """y (b t h v) and the state (b g k v) after a span."""
    (state,) = states
    g, dtype, t = state.shape[1], state.dtype, call.n_tokens
    cut, of_keys = cut_of(t, call["chunk_size"]), not call["of_values"]
    q, k, v, log_a = (_load(call, cut, call[name], g, dtype) for name in ("q", "k", "v", "log_a"))
    bonus = call["bonus"]
    bonus = None if bonus is None else bonus.to(dtype).view(g, -1, 1, bonus.shape[-1])
    documents = documents_of(call, cut)
    log_a = log_a.clamp(min=-1000.0)
    y, decays = near(q, k, v, log_a.exp(), bonus, of_keys, documents)
    into, tail = (x.squeeze(-3) for x in (decays.until, decays.after))  # [b c g 1 l d]
    whole = log_a.sum(-2).exp()  # [b c g 1 d]; not the product, which rounds at each token
    if documents is not None:
        into = into.masked_fill(_to_places(documents.ids != documents.before[..., None]), 0)
        tail = tail.masked_fill(_to_places(documents.ids != documents.last[..., None]), 0)
        whole = whole.masked_fill((documents.last != documents.before)[:, :, None, None, None], 0)
    writes = ((k * tail).mT @ v if of_keys else k.mT @ (v * tail)).squeeze(3)  # [b c g k v]
    entered, state = _walk(state, writes, whole.mT if of_keys else whole)
    y = y + ((q * into) @ entered if of_keys else (q @ entered) * into)
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)  # [b c l h v]
    return cut.join(y, t), (state,)


def _load(call: Call, cut: Cut, x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """(b t heads width) as (b c g r l width) in the precision of the state, zero at pads."""
    if call.masks is not None:
        x = x.masked_fill(~call.masks.real[..., None, None], 0)
    by_group: Tensor = cut.lay(x.to(dtype)).unflatten(3, (groups, -1))
    return by_group.permute(0, 1, 3, 4, 2, 5).contiguous()


def _to_places(mask: Tensor) -> Tensor:
    """(b c l) against (b c g r l d)."""
    return mask[:, :, None, None, :, None]


def _walk(state: Tensor, writes: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The state entering each chunk (b c g 1 k v), and the last one."""
    entered = []
    for write, kept in zip(writes.unbind(1), whole.unbind(1), strict=True):
        entered.append(state)
        state = torch.addcmul(write, state, kept)
    return torch.stack(entered, 1).unsqueeze(3), state
