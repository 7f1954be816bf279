"""Attention of groups of queries to their lists of keys: gather, one product, softmax; group by group in chunks.

Both passes are custom operators. The backward computes each chunk again and lets autograd differentiate that one, so that
memory is linear in length. Axes: n groups of a chunk, m queries of a group, l keys of a group, h query heads of a unit, g key
heads of a unit, k key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.block_sparse_attention.candidates import Lists, Marks, lists_of, positions
from hybridtf.ops.block_sparse_attention.flops import register_formulas
from hybridtf.ops.block_sparse_attention.groups import Groups, by_block, by_position
from hybridtf.ops.block_sparse_attention.parts import PARTS, clauses_of, earlier
from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule
from hybridtf.ops.exponential import exp
from hybridtf.ops.gradients import autograd_inside, with_backward
from hybridtf.ops.spans import by_device

_BUDGET_CPU, _BUDGET_GPU = 2**20, 2**26
_TILE_CPU, _TILE_GPU = 64, 128

@dataclass(frozen=True, eq=False)
class _Call:
    """One part of a call inside the operators: what forward and backward must do alike."""

    q: Tensor
    k: Tensor
    v: Tensor
    places: Places
    marked: Tensor | None
    blocks: Tensor | None
    rule: SparseRule
    part: str
    scale: float

    @property
    def choosers(self) -> int:
        return self.blocks.shape[2] if self.blocks is not None and self.part == "chosen" else 1

    def queries(self, x: Tensor) -> Tensor:
        """(b t h ...) -> (b t c, h / c, ...)"""
        return x.reshape(x.shape[0] * x.shape[1] * self.choosers, x.shape[2] // self.choosers, *x.shape[3:])

    def keys(self, x: Tensor) -> Tensor:
        """(b s g k) -> (b s, g, k), or (b s g, 1, k) where heads choose for themselves."""
        return x.reshape(-1, x.shape[2] if self.choosers == 1 else 1, x.shape[3])

    def result_shape(self) -> tuple[int, int]:
        """Rows of the flat result, and heads of each."""
        b, t, h, _ = self.q.shape
        choices = self.blocks.shape[3] if self.blocks is not None and self.part == "chosen" else 1
        return b * t * self.choosers * choices, h // self.choosers

    def groups(self) -> Groups:
        size = min(by_device(self.q.device, _TILE_CPU, _TILE_GPU), max(self.q.shape[1], 1))
        if self.part == "chosen":
            assert self.blocks is not None
            return by_block(self.places, self.rule, self.blocks, size)
        step = {"local": 1, "dilated": self.rule.dilation, "stride": self.rule.stride}[self.part]
        return by_position(self.places, self.rule, step, min(size, self.rule.block) if step == 1 else size)

    def chunks(self) -> Iterator[_Chunk]:
        """All groups, those with lists of like lengths together."""
        groups = self.groups()
        marks = None if self.marked is None else Marks.of(self.marked)
        names = clauses_of(self.rule, self.part, self.marked is not None)
        lists = [lists_of(name, groups, self.rule, marks) for name in names]
        if not len(groups.row) * self.k.shape[1]:
            return
        order = torch.argsort(torch.stack([one.length for one in lists]).sum(0), stable=True)
        lengths = torch.stack([one.length[order] for one in lists], 1).tolist()
        size, budget = groups.source.shape[1], by_device(self.q.device, _BUDGET_CPU, _BUDGET_GPU)
        per_key = size * self.result_shape()[1] + self.k.shape[3] + self.v.shape[3]
        start = 0
        while start < len(order):
            stop, widths = _extent(lengths, start, budget // per_key)
            index = order[start:stop]
            kept = [(one.take(index), width) for one, width in zip(lists, widths, strict=True) if width]
            if kept:
                yield _Chunk(self, groups.take(index), kept, marks)
            start = stop


def _extent(lengths: list[list[int]], start: int, most: int) -> tuple[int, list[int]]:
    """Where the chunk from ``start`` on ends, and its longest list of each clause: ``most`` keys in all, or one group."""
    widths, stop = lengths[start], start + 1
    while stop < len(lengths):
        wider = [max(pair) for pair in zip(widths, lengths[stop], strict=True)]
        if sum(wider) * (stop + 1 - start) > most:
            break
        widths, stop = wider, stop + 1
    return stop, widths


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some groups with the lists of their keys."""

    call: _Call
    groups: Groups
    lists: list[tuple[Lists, int]]
    marks: Marks | None

    @property
    def pairs(self) -> int:
        """Of a query and a key, masked ones too."""
        return self.groups.source.numel() * sum(width for _, width in self.lists)

    def keys(self) -> tuple[Tensor, Tensor]:
        """(n l) index of each key in the flat keys, and (n m l) bool: the query sees it."""
        call, groups, rule = self.call, self.groups, self.call.rule
        token = torch.div(groups.source.clamp(min=0), call.choosers, rounding_mode="floor")
        p = call.places.position.flatten()[token][..., None]
        total = (groups.start + groups.count)[:, None, None]
        before = list(earlier(rule, call.part, call.marked is not None))
        found = []
        for lists, width in self.lists:
            at, held = positions(lists, width, groups, rule, self.marks)
            slot = torch.where(held, at - groups.start[:, None] + groups.first[:, None], 0) % call.k.shape[1]
            slot = slot + groups.row[:, None] * call.k.shape[1]
            j = at[:, None]
            seen = held[:, None] & (groups.source >= 0)[..., None]
            if rule.causal:
                seen = seen & (j <= p)
            if lists.clause in rule.clauses:
                seen = seen & rule.shows(lists.clause, p, j, total)
            for clause in before:
                seen = seen & ~self._shown(clause, p, j, total, slot)
            before.append(lists.clause)
            found.append((slot, seen))
        slots, seen = torch.cat([slot for slot, _ in found], 1), torch.cat([seen for _, seen in found], 2)
        if call.choosers > 1:
            g = call.k.shape[2]
            head = torch.div(groups.chooser * g, call.choosers, rounding_mode="floor")
            slots = slots * g + head[:, None]
        return slots, seen

    def _shown(self, clause: str, p: Tensor, j: Tensor, total: Tensor, slot: Tensor) -> Tensor:
        if clause == "marked":
            assert self.call.marked is not None
            return self.call.marked.flatten()[slot][:, None]
        return self.call.rule.shows(clause, p, j, total)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q (n m h k), k (n l g k), v (n l g v), seen (n m l) -> (n m h v), and the log of each sum (n m h), -inf for nothing."""
    n, m, h, width = q.shape
    g = k.shape[2]
    rows = q.to(dtype).mul(scale).view(n, m, g, h // g, width).permute(0, 2, 3, 1, 4).reshape(n, g, -1, width)
    scores = (rows @ k.to(dtype).permute(0, 2, 3, 1)).view(n, g, h // g, m, -1)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    # A query that sees nothing has the maximum -inf; 0 in its place keeps -inf - -inf out of the exponent.
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = exp(scores - base)
    total = weights.sum(-1, keepdim=True)
    alone = total == 0
    total = total.masked_fill(alone, 1.0)
    y = (weights / total).view(n, g, -1, seen.shape[2]) @ v.to(dtype).transpose(1, 2)
    y = y.view(n, g, h // g, m, -1).permute(0, 3, 1, 2, 4).reshape(n, m, h, -1)
    lse = (base + total.log()).masked_fill(alone, -torch.inf)
    return y, lse[..., 0].permute(0, 3, 1, 2).reshape(n, m, h)


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(call.q.dtype)
    rows, heads = call.result_shape()
    y = torch.zeros(rows, heads, call.v.shape[3], dtype=dtype, device=call.q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=call.q.device)
    q, k, v = call.queries(call.q), call.keys(call.k), call.keys(call.v)
    for chunk in call.chunks():
        slots, seen = chunk.keys()
        member = chunk.groups.source >= 0
        part, logs = _attend(q[chunk.groups.source.clamp(min=0)], k[slots], v[slots], seen, call.scale, dtype)
        target = chunk.groups.target[member]
        y[target], lse[target] = part[member], logs[member]
    return y, lse


def _backward(call: _Call, dy: Tensor, dlse: Tensor) -> list[Tensor]:
    dtype = accumulate_dtype(call.q.dtype)
    q, k, v = call.queries(call.q), call.keys(call.k), call.keys(call.v)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for chunk in call.chunks():
        slots, seen = chunk.keys()
        member = chunk.groups.source >= 0
        source, target = chunk.groups.source.clamp(min=0), chunk.groups.target.clamp(min=0)
        logs = torch.where(member[..., None], dlse[target], 0.0)
        with autograd_inside():
            given = [x.detach().to(dtype).requires_grad_() for x in (q[source], k[slots], v[slots])]
            out = _attend(given[0], given[1], given[2], seen, call.scale, dtype)
            found = torch.autograd.grad(out, given, [dy[target].masked_fill(~member[..., None, None], 0), logs])
        dq.index_add_(0, source[member], found[0][member])
        dk.index_add_(0, slots.flatten(), found[1].flatten(0, 1))
        dv.index_add_(0, slots.flatten(), found[2].flatten(0, 1))
    return [d.view(x.shape).to(x.dtype) for d, x in ((dq, call.q), (dk, call.k), (dv, call.v))]


# -- operators -------------------------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor position, Tensor first, Tensor start, Tensor count, Tensor? marked, "
    "Tensor? blocks, int[] rule, int part, float scale"
)
_N_TENSORS = 9


def _call(inputs: Sequence[Any]) -> _Call:
    q, k, v, position, first, start, count, marked, blocks, rule, part, scale = inputs
    fields = list(rule)
    fields[1] = bool(fields[1])
    return _Call(q, k, v, Places(position, first, start, count), marked, blocks, SparseRule(*fields), PARTS[part], scale)


@torch.library.custom_op(
    "hybridtf::block_sparse_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def _forward_op(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = _call(inputs)
    with no_autocast(call.q.device):
        return _forward(call)


@_forward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = _call(inputs)
    rows, heads = call.result_shape()
    dtype = accumulate_dtype(call.q.dtype)
    return call.q.new_empty(rows, heads, call.v.shape[3], dtype=dtype), call.q.new_empty(rows, heads, dtype=dtype)


@torch.library.custom_op(
    "hybridtf::block_sparse_attention_backward", mutates_args=(),
    schema=f"(Tensor dy, Tensor dlse, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(dy: Tensor, dlse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = _call(inputs)
    with no_autocast(call.q.device):
        return tuple(_backward(call, dy, dlse))


@_backward_op.register_fake
def _(dy: Tensor, dlse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


register_formulas(_call)


_Grouped: Any = with_backward(
    torch.ops.hybridtf.block_sparse_attention.default, torch.ops.hybridtf.block_sparse_attention_backward.default,
    op="block_sparse_attention", kernel="grouped", n_tensors=_N_TENSORS,
    place=lambda tensors, found: (*found, *[None] * (len(tensors) - len(found))),
)


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: SparseRule, part: str, marked: Tensor | None,
    blocks: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:
    """One part of the softmax and the log of its sum: (b t h v) and (b t h), or with a choice's axis for ``chosen``, (b t c n
    h/c v) and (b t c n h/c). Both are differentiable once."""
    op: Any = _Grouped.apply if torch.is_grad_enabled() else _forward_op
    # Views, since the compiler refuses one tensor in two places.
    tensors = [x.view_as(x) for x in (q, k, v, places.position, places.first, places.start, places.count)]
    y, lse = op(*tensors, marked, blocks, [int(x) for x in astuple(rule)], PARTS.index(part), scale)
    return y, lse
