"""Which blocks of keys a block of queries needs: all tiles that hold nothing visible are skipped.

What is skipped is surely invisible; what is visited may be. It reads only the smallest and largest position and
document of each block (a few numbers per block, brought to the host in one copy), or nothing but lengths where the call
has no ids and default positions.

Axes: b rows with their own ids or positions (1 where all rows agree), i blocks of queries, j blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import AttentionMask

_FAR = 2**62


@dataclass(frozen=True, eq=False)
class Extent:
    """Smallest and largest position and id per block, (b blocks) int64 on the CPU, of its real tokens only.

    ``low > high`` says that the block has no real token, or ``low = -_FAR``, ``high = _FAR`` that nothing is known.
    ``whole``: no token of the block is padding.
    """

    pos_low: Tensor
    pos_high: Tensor
    id_low: Tensor
    id_high: Tensor
    whole: Tensor
    prefix_low: Tensor
    prefix_high: Tensor


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """For every block of queries the blocks of keys to visit, see :func:`plan_blocks`."""

    mask: AttentionMask
    queries: Extent
    keys: Extent

    def row(self, i: int) -> list[tuple[int, bool]]:
        """``(j, partial)`` for block ``i`` of queries; ``partial``: some pair of the tile may be invisible."""
        q = Extent(*(x[:, i, None] for x in vars(self.queries).values()))
        visit, full = self._ids(q)
        near, inside = self._positions(q)
        visit, full = (visit & near).any(0), (full & inside).all(0)
        partial = (~full)[visit].tolist()
        return list(zip(visit.nonzero()[:, 0].tolist(), partial, strict=True))

    def _ids(self, q: Extent) -> tuple[Tensor, Tensor]:
        k = self.keys
        meet = (q.id_low <= k.id_high) & (k.id_low <= q.id_high) & (q.id_low <= q.id_high) & (k.id_low <= k.id_high)
        one = (q.id_low == q.id_high) & (q.id_low == k.id_low) & (k.id_low == k.id_high) & q.whole & k.whole
        return meet, one

    def _positions(self, q: Extent) -> tuple[Tensor, Tensor]:
        k, window = self.keys, self.mask.window
        near = torch.ones_like(q.pos_low + k.pos_low, dtype=torch.bool)
        inside = near.clone()
        if self.mask.causal:
            near &= k.pos_low <= q.pos_high
            inside &= k.pos_high <= q.pos_low
        if window is not None:
            near &= k.pos_high > q.pos_low - window
            inside &= k.pos_low > q.pos_high - window
            if not self.mask.causal:
                near &= k.pos_low < q.pos_high + window
                inside &= k.pos_high < q.pos_low + window
        if self.mask.prefix_len is not None:
            near |= (k.pos_low < q.prefix_high) & (q.pos_low < q.prefix_high)
            inside |= (k.pos_high < q.prefix_low) & (q.pos_high < q.prefix_low)
        return near, inside


def plan_blocks(mask: AttentionMask, t: int, s: int, block_q: int, block_k: int, *, sync: bool) -> BlockPlan:
    """The plan of a call of ``t`` queries and ``s`` keys. With ``sync`` False nothing is read from the device: ids and
    given positions then count as unknown, and only default positions let a tile be skipped."""
    read = [x for x in (mask.q_pos, mask.q_ids, mask.prefix_len) if x is not None and sync]
    device = read[0].device if read else torch.device("cpu")
    sides = [
        *_side(mask.q_pos, mask.q_ids, mask.prefix_len, s - t, t, block_q, sync),
        *_side(mask.k_pos, mask.k_ids, None, 0, s, block_k, sync),
    ]
    parts = [side.to(device) for side in sides]
    rows = max(part.shape[0] for part in parts)
    n_q = parts[0].shape[1]
    # One copy for all: the host waits for the device once.
    host = torch.cat([part.expand(rows, -1) for part in parts], dim=1).cpu()
    return BlockPlan(mask, _extent(host[:, : 7 * n_q]), _extent(host[:, 7 * n_q :]))


def _extent(part: Tensor) -> Extent:
    pos_low, pos_high, id_low, id_high, real, prefix_low, prefix_high = part.chunk(7, dim=1)
    return Extent(pos_low, pos_high, id_low, id_high, real > 0, prefix_low, prefix_high)


def _side(
    pos: Tensor | None, ids: Tensor | None, prefix: Tensor | None, first: int, n: int, block: int, sync: bool
) -> list[Tensor]:
    """The seven fields of an :class:`Extent`, each (b or 1, blocks)."""
    count = -(-n // block)
    unknown = torch.tensor([[-_FAR], [_FAR]]).expand(2, count).unsqueeze(1)
    real = ids > 0 if ids is not None and sync else None
    if pos is None:
        start = first + block * torch.arange(count)
        low, high = start[None], (start + block - 1).clamp(max=first + n - 1)[None]
    else:
        low, high = _range(pos, real, block) if sync else unknown.unbind(0)
    if ids is None:
        id_low = id_high = complete = torch.ones(1, count, dtype=torch.int64)
    elif real is None:
        id_low, id_high, complete = *unknown.unbind(0), torch.zeros(1, count, dtype=torch.int64)
    else:
        id_low, id_high = _range(ids, real, block)
        complete = _range(real.to(torch.int64), None, block)[0]
    prefix_low, prefix_high = unknown.unbind(0) if prefix is None or not sync else _range(prefix, real, block)
    return [low, high, id_low, id_high, complete, prefix_low, prefix_high]


def _range(x: Tensor, real: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each block of (b n), counting real tokens only."""
    spare = -x.shape[1] % block
    sides = []
    for fill, reduce in ((_FAR, Tensor.amin), (-_FAR, Tensor.amax)):
        kept = x if real is None else x.masked_fill(~real, fill)
        padded = torch.nn.functional.pad(kept, (0, spare), value=fill)
        sides.append(reduce(padded.reshape(len(x), padded.shape[1] // block, block), 2))
    return sides[0], sides[1]
