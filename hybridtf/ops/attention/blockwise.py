"""Attention by blocks of queries and keys with an online softmax: memory linear in length, for every mask rule.

Both passes are custom operators: ``torch.compile`` and tracers see one call, whatever the number of blocks. The
derivation is in the README beside this file.

Axes: b batch, t queries, s keys, g key heads, r query heads per key head, m = r * (queries of the block), n keys of the
block, k key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridtf.ops.attention.bias import RelativeRows, decay_of
from hybridtf.ops.attention.blocks import plan_blocks
from hybridtf.ops.attention.flops import register_formulas
from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype, check_inputs
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.exponential import exp_
from hybridtf.ops.gradients import with_backward
from hybridtf.ops.spans import by_device

_TILE_CPU = 2**18
_TILE_GPU = 2**25


def attention_blockwise(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0,
    block_q: int | None = None, block_k: int | None = None,
) -> Tensor:
    """The same function as :func:`attention_reference`, in memory linear in length (Milakov and Gimelshein 2018, arXiv
    1805.02867; Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135).

    Shapes and errors as there. ``block_q`` and ``block_k`` are sizes in tokens, None chooses them by the shapes.
    Dropout draws one seed from torch's global CPU generator; the same seed with other block sizes drops other weights.
    There is no gradient of the gradient.
    """
    check_inputs(q, k, v, mask, dropout_p)
    seed = torch.randint(2**31, (1,), device="cpu") if dropout_p > 0 else None
    op: Any = _Blockwise.apply if torch.is_grad_enabled() else _forward_op
    # Views, since the compiler refuses one tensor in two places.
    k_ids, k_pos = (None if x is None else x.view_as(x) for x in (mask.k_ids, mask.k_pos))
    out: Tensor = op(
        q, k.view_as(k), v.view_as(v), mask.q_ids, k_ids, mask.q_pos, k_pos, mask.prefix_len, mask.slopes, mask.sinks,
        mask.q_decay, None if mask.k_decay is None else mask.k_decay.view_as(mask.k_decay), mask.rel_q, mask.rel_bank, seed,
        mask.causal, mask.window, mask.softcap, q.shape[3] ** -0.5 if scale is None else scale, dropout_p,
        block_q, block_k, not torch.compiler.is_compiling(),
    )[0]
    return out.to(q.dtype)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call inside the operators: what forward and backward must do alike."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    seed: Tensor | None
    scale: float
    dropout_p: float
    block_q: int
    block_k: int
    sync: bool

    @property
    def dtype(self) -> torch.dtype:
        return accumulate_dtype(self.q.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the output: q's, but with decays the accumulating one. Their gradients are sums of rows and columns, which cancel:
        of an output that is rounded, the rounding would be most of what is left."""
        return self.q.dtype if self.mask.q_decay is None else self.dtype

    @property
    def groups(self) -> tuple[int, int, int]:
        """(b, g, r)"""
        b, _, h, _ = self.q.shape
        return b, self.k.shape[2], h // self.k.shape[2]

    def per_head(self, x: Tensor) -> Tensor:
        """(h) -> (g r 1 1), to broadcast over (b g r queries keys)."""
        _, g, r = self.groups
        return x.to(self.dtype).view(g, r, 1, 1)

    def sinks(self, q0: int, q1: int) -> Tensor:
        """(b g m 1) of the block's queries."""
        assert self.mask.sinks is not None
        return self.fold(self.mask.sinks.expand(self.q.shape[:3])[..., None], q0, q1)

    def fold(self, x: Tensor, q0: int, q1: int) -> Tensor:
        """(b t h k) -> (b g m k) for the block's queries: heads that share a key head become rows of one product."""
        b, g, r = self.groups
        part = x[:, q0:q1].to(self.dtype).reshape(b, q1 - q0, g, r, x.shape[3])
        return part.permute(0, 2, 3, 1, 4).reshape(b, g, r * (q1 - q0), x.shape[3])

    def unfold(self, x: Tensor, n: int) -> Tensor:
        """(b g m k) -> (b n h k), the inverse of :meth:`fold`."""
        return x.reshape(*self.groups, n, x.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def block(self, x: Tensor, k0: int, k1: int) -> Tensor:
        """(b s g k) -> (b g n k) for the block's keys."""
        return x[:, k0:k1].to(self.dtype).transpose(1, 2)

    def tiles(self) -> Iterator[tuple[int, int, list[tuple[int, int, int, bool]]]]:
        """Blocks of queries ``q0, q1``, each with the tiles it needs: number, ``k0``, ``k1``, and whether some pair may be
        invisible."""
        t, s, size = self.q.shape[1], self.k.shape[1], self.block_k
        plan = plan_blocks(self.mask, t, s, self.block_q, size, sync=self.sync)
        for i, q0 in enumerate(range(0, t, self.block_q)):
            needed = [(j, j * size, min((j + 1) * size, s), partial) for j, partial in plan.row(i)]
            yield q0, min(q0 + self.block_q, t), needed

    def walk(self) -> Iterator[tuple[int, int, list[_Tile]]]:
        """:meth:`tiles`, ready to be computed."""
        for i, (q0, q1, needed) in enumerate(self.tiles()):
            at = Tile(self.q.shape[1], self.k.shape[1], q0, q1, 0, 0, self.q.device)
            relative = RelativeRows.of_queries(self.mask, at, self.dtype)
            yield q0, q1, [
                _Tile(self, replace(at, k0=k0, k1=k1), i, j, partial, relative) for j, k0, k1, partial in needed
            ]


@dataclass(frozen=True, eq=False)
class _Tile:
    """One block of queries against one block of keys."""

    call: _Call
    at: Tile
    i: int
    j: int
    partial: bool
    relative: RelativeRows | None

    def hidden(self) -> Tensor | None:
        """(b 1 1 queries keys) bool: pairs that do not see each other; None: all do."""
        seen = self.at.visible(self.call.mask) if self.partial else None
        return None if seen is None else ~seen[:, None, None]

    def heads(self, x: Tensor) -> Tensor:
        """(b g m n) seen as (b g r queries keys)."""
        return x.view(*self.call.groups, self.at.q1 - self.at.q0, self.at.k1 - self.at.k0)

    def score(self, raw: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores (b g m n) from raw products, in place, and the softcap's tanh where there is one."""
        mask, bent = self.call.mask, None
        if mask.softcap is not None:
            bent = raw.div_(mask.softcap).tanh_()
            raw = bent * mask.softcap
        if mask.slopes is not None:
            self.heads(raw).sub_(self.call.per_head(mask.slopes) * self.at.distance(mask)[:, None, None])
        relative = None if self.relative is None else self.relative.bias(self.at)
        for added in (decay_of(mask, self.at, raw.dtype), relative):
            if added is not None:
                self.heads(raw).add_(added.unflatten(1, self.call.groups[1:]))
        if hidden is not None:
            self.heads(raw).masked_fill_(hidden, -torch.inf)
        return raw, bent

    def exp_(self, scores: Tensor) -> Tensor:
        """In place. Where nothing is hidden and no bias grows with distance, scores are seldom so low that exp is slow."""
        mask = self.call.mask
        falls = self.partial or mask.slopes is not None or mask.q_decay is not None
        return exp_(scores) if falls else scores.exp_()

    def kept(self, like: Tensor) -> Tensor | None:
        """Dropout factors of the tile's weights, the same whenever they are asked for; None: nothing is dropped."""
        call = self.call
        if call.seed is None:
            return None
        generator = torch.Generator(like.device)
        generator.manual_seed((int(call.seed) * 0x9E3779B1 + self.i * 0x85EBCA77 + self.j * 0xC2B2AE3D) % 2**63)
        drawn = torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        return (drawn >= call.dropout_p).to(like.dtype).div_(1 - call.dropout_p)


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    """out (b t h v) in ``out_dtype``, and the log of each row's sum (b t h 1); 0 for a row that sees nothing."""
    b, t, h, _ = call.q.shape
    out = call.q.new_zeros(b, t, h, call.v.shape[3], dtype=call.out_dtype)
    lse = torch.zeros(b, t, h, 1, dtype=call.dtype, device=call.q.device)
    if not call.q.shape[0] * call.k.shape[1]:
        return out, lse
    for q0, q1, tiles in call.walk():
        rows, logs = _forward_rows(call, q0, q1, tiles)
        out[:, q0:q1] = call.unfold(rows, q1 - q0)
        lse[:, q0:q1] = call.unfold(logs, q1 - q0)
    return out, lse


def _forward_rows(call: _Call, q0: int, q1: int, tiles: list[_Tile]) -> tuple[Tensor, Tensor]:
    q = call.fold(call.q, q0, q1) * call.scale
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = q.new_zeros(*q.shape[:3], call.v.shape[3])
    if call.mask.sinks is not None:
        top = call.sinks(q0, q1)
        total = torch.ones_like(top)
    for tile in tiles:
        k, v = (call.block(x, tile.at.k0, tile.at.k1).flatten(0, 1) for x in (call.k, call.v))
        # Products of three axes, in place where possible: a walk of many tiles costs what it calls.
        raw = torch.bmm(q.flatten(0, 1), k.transpose(1, 2)).unflatten(0, q.shape[:2])
        scores, _ = tile.score(raw, tile.hidden())
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has the maximum -inf; a number in its place keeps -inf - -inf out of the exponent.
        base = higher.clamp_min(torch.finfo(higher.dtype).min)
        weights = tile.exp_(scores.sub_(base))
        shrink = (top - base).exp()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        kept = tile.kept(weights)
        weights = weights if kept is None else weights.mul_(kept)
        acc.mul_(shrink).flatten(0, 1).baddbmm_(weights.flatten(0, 1), v)
        top = higher
    seen = total > 0
    safe = total.masked_fill(~seen, 1.0)
    return acc / safe, torch.where(seen, top + safe.log(), 0.0)


@dataclass(frozen=True, eq=False)
class _Grads:
    """What the backward pass adds up, by the names of a call's tensors, all in the accumulating dtype; of biases that a call
    does not have, nothing."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    sinks: Tensor
    q_decay: Tensor
    k_decay: Tensor
    rel_q: Tensor
    rel_bank: Tensor

    @classmethod
    def zeros(cls, call: _Call) -> _Grads:
        q, k, v = (torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in (call.q, call.k, call.v))
        biases = [getattr(call.mask, name) for name in _BIASES]
        return cls(q, k, v, *(q.new_zeros(() if x is None else x.shape) for x in biases))

    def add_biases(self, tile: _Tile, ds: Tensor) -> None:
        """From the gradients (b g r queries keys) of a tile's scores."""
        mask, at = tile.call.mask, tile.at
        if mask.slopes is not None:
            self.slopes.sub_((ds * at.distance(mask)[:, None, None]).sum((0, 3, 4)).flatten())
        if mask.q_decay is not None:
            self.q_decay[:, at.q0 : at.q1] += ds.sum(4).flatten(1, 2).mT
            self.k_decay[:, at.k0 : at.k1] -= ds.sum(3).flatten(1, 2).mT
        if tile.relative is not None:
            tile.relative.add_gradient(at, ds.flatten(1, 2))


def _backward(call: _Call, grad: Tensor, out: Tensor, lse: Tensor) -> _Grads:
    grads = _Grads.zeros(call)
    if not call.q.shape[0] * call.k.shape[1]:
        return grads
    for q0, q1, tiles in call.walk():
        n = q1 - q0
        upper, logs = call.fold(grad, q0, q1), call.fold(lse, q0, q1)
        mean = (upper * call.fold(out, q0, q1)).sum(-1, keepdim=True)
        if call.mask.sinks is not None:
            of_sinks = call.unfold((call.sinks(q0, q1) - logs).exp().mul_(mean), n).squeeze(-1)
            if call.mask.sinks.ndim == 3:
                grads.sinks[:, q0:q1].sub_(of_sinks)
            else:
                grads.sinks.sub_(of_sinks.sum((0, 1)))
        q = call.fold(call.q, q0, q1) * call.scale
        dq = torch.zeros_like(q)
        for tile in tiles:
            _backward_tile(call, tile, (q, upper, logs, mean), dq, grads)
        grads.q[:, q0:q1] = call.unfold(dq, n).mul_(call.scale)
        if tiles and tiles[0].relative is not None:
            grads.rel_q[:, q0:q1], bank = tiles[0].relative.gradients()
            grads.rel_bank.add_(bank)
    return grads


def _backward_tile(
    call: _Call, tile: _Tile, rows: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, grads: _Grads
) -> None:
    """Add one tile's part. ``rows``: scaled queries, upstream gradient, log sums, and the mean of the latter's product
    with the output, each (b g m ...)."""
    q, upper, logs, mean = rows
    k0, k1 = tile.at.k0, tile.at.k1
    k, v = call.block(call.k, k0, k1), call.block(call.v, k0, k1)
    hidden = tile.hidden()
    scores, bent = tile.score(q @ k.mT, hidden)
    weights = tile.exp_(scores.sub_(logs))
    dw = upper @ v.mT
    kept = tile.kept(weights)
    if kept is not None:
        dw.mul_(kept)
    ds = dw.sub_(mean).mul_(weights)
    dv = (weights if kept is None else weights.mul_(kept)).mT @ upper
    grads.v[:, k0:k1] += dv.transpose(1, 2)
    if hidden is not None:
        # The weight there is 0, but an invisible value may have made its factor infinite.
        tile.heads(ds).masked_fill_(hidden, 0.0)
    grads.add_biases(tile, tile.heads(ds))
    if bent is not None:
        ds.mul_(bent.square_().neg_().add_(1.0))
        if hidden is not None:
            tile.heads(ds).masked_fill_(hidden, 0.0)
    dq += ds @ k
    grads.k[:, k0:k1] += (ds.mT @ q).transpose(1, 2)


# -- operators -------------------------------------------------------------------------------------------------------


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_ids, Tensor? k_ids, Tensor? q_pos, Tensor? k_pos, Tensor? prefix_len, "
    "Tensor? slopes, Tensor? sinks, Tensor? q_decay, Tensor? k_decay, Tensor? rel_q, Tensor? rel_bank, "
    "Tensor? seed, bool causal, int? window, float? softcap, float scale, float dropout_p, int? block_q, int? block_k, "
    "bool sync"
)
_N_TENSORS, _N_OPTIONS = 15, 8
_BIASES = ("slopes", "sinks", "q_decay", "k_decay", "rel_q", "rel_bank")


def _call(inputs: tuple[Any, ...]) -> _Call:
    """The call that ``_INPUTS`` describes."""
    q, k, v, q_ids, k_ids, q_pos, k_pos, prefix_len, *biases, seed = inputs[:_N_TENSORS]
    causal, window, softcap, scale, dropout_p, block_q, block_k, sync = inputs[_N_TENSORS:]
    mask = AttentionMask(causal, window, q_ids, k_ids, q_pos, k_pos, prefix_len, softcap, *biases)
    auto_q, auto_k = _block_sizes(q, k)
    return _Call(q, k, v, mask, seed, scale, dropout_p, block_q or auto_q, block_k or auto_k, sync)


def _block_sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Tokens per block, so that a tile of scores stays in cache (CPU) or is worth a launch (GPU)."""
    b, t, h, _ = q.shape
    area = by_device(q.device, _TILE_CPU, _TILE_GPU) // max(b * h, 1)
    block_q = min(max(t, 1), 256, max(64, 2 ** (int(area**0.5).bit_length() - 1)))
    return block_q, max(64, area // block_q // 64 * 64)


@torch.library.custom_op(
    "hybridtf::attention_blockwise", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def _forward_op(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = _call(inputs)
    with no_autocast(call.q.device):
        return _forward(call)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    wide, decays = accumulate_dtype(q.dtype), rest[5 + _BIASES.index("q_decay")]
    out = q.new_empty(b, t, h, v.shape[3], dtype=q.dtype if decays is None else wide)
    return out, q.new_empty(b, t, h, 1, dtype=wide)


@torch.library.custom_op(
    "hybridtf::attention_blockwise_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}) -> ({', '.join(['Tensor'] * (3 + len(_BIASES)))})",
)
def _backward_op(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = _call(inputs)
    with no_autocast(call.q.device):
        grads = _backward(call, grad, out, lse)
    projected = (grads.q.to(call.q.dtype), grads.k.to(call.k.dtype), grads.v.to(call.v.dtype))
    return (*projected, *(getattr(grads, name) for name in _BIASES))


@_backward_op.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wide, given = accumulate_dtype(q.dtype), rest[5 : 5 + len(_BIASES)]
    biases = [q.new_empty(() if x is None else x.shape, dtype=wide) for x in given]
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *biases)


register_formulas(_call)


def _place(tensors: Sequence[Tensor | None], found: Sequence[Tensor]) -> Sequence[Tensor | None]:
    dq, dk, dv, *wide = found
    biases = [None if x is None else d.to(x.dtype) for d, x in zip(wide, tensors[8 : 8 + len(_BIASES)], strict=True)]
    return dq, dk, dv, *[None] * 5, *biases, None


_Blockwise: Any = with_backward(
    torch.ops.hybridtf.attention_blockwise.default, torch.ops.hybridtf.attention_blockwise_backward.default,
    op="attention", kernel="blockwise", n_tensors=_N_TENSORS, place=_place, keep_results=True,
)
