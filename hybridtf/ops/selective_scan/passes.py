"""Both passes of ``selective_scan_chunked`` over a chunk, outside autograd. README.md has the derivation.

Axes: b batch, t time, r rows (batch by groups), l places of a chunk, n states a channel, c channels of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.selective_scan.blocks import Block, blocks_of, lay, load, rows_of, stays, unload
from hybridtf.ops.selective_scan.tree import products, scan_, scan_back_
from hybridtf.ops.span_op import SpanGradients


class Chunk(NamedTuple):
    """What both passes read of a chunk, in the precision of the state."""

    x: Tensor  # (l r c)
    dt: Tensor  # (l r c)
    B: Tensor  # (l r n)
    C: Tensor  # (l r n)
    stays: Tensor | None  # (l r 1 1)


class Sums(NamedTuple):
    """Gradients that the pass over blocks adds up."""

    x: Tensor  # (l r c)
    dt: Tensor  # (l r c)
    B: Tensor  # (l r n)
    C: Tensor  # (l r n)
    A: Tensor  # (r n c)


def forward_span(call: Call, states: States) -> tuple[Tensor, States]:
    """y (b l c) of a chunk, and the state after it; the one before is (r n c). A is (r n c) and D (r c), as the state is."""
    (state,), chunk = states, _load(call, states[0].dtype)
    A, out = call["A"], torch.empty_like(chunk.x)
    after = torch.empty_like(state, memory_format=torch.contiguous_format)
    for block in blocks_of(out.shape, A.shape[1], out.device):
        h, _ = _states(chunk, A, state, block)
        block.cut(out).copy_((chunk.C[:, block.rows, None] @ h)[:, :, 0])
        block.states(after).copy_(h[-1])
    if call["D"] is not None:
        out.addcmul_(call["D"], chunk.x)
    return unload(out, call["x"]), (after,)


def backward_span(call: Call, states: States, dy: Tensor, dstates: States) -> SpanGradients:
    """Gradients of x, dt, B and C of a chunk, of A (r n c) and D (r c), and of the state before it."""
    (before,), dtype = states, dstates[0].dtype
    dstate = dstates[0].clone(memory_format=torch.contiguous_format)
    A, D = call["A"], call["D"]
    chunk, dout = _load(call, dtype), lay(call, dy, dtype)
    sums = Sums(*(torch.zeros_like(z) for z in (chunk.x, chunk.dt, chunk.B, chunk.C, A)))
    for block in blocks_of(dout.shape, A.shape[1], dout.device):
        _backward_block(chunk, A, before, dout, dstate, block, sums)
    fixed = [sums.A]
    if D is not None:
        sums.x.addcmul_(D, dout)
        fixed.append((dout * chunk.x).sum(0))
    if call.masks is not None:
        # A pad has no time step, but its state has decays around it: what they give is no gradient of the pad.
        sums.dt.view(len(dout), *rows_of(call), -1).masked_fill_(~call.masks.real.T[..., None, None], 0)
    timed = [unload(part, call[name]) for part, name in zip(sums[:4], ("x", "dt", "B", "C"), strict=True)]
    return SpanGradients(timed, fixed, (dstate,))


def _load(call: Call, dtype: torch.dtype) -> Chunk:
    x, dt, B, C = (load(call, name, dtype) for name in ("x", "dt", "B", "C"))
    return Chunk(x, dt, B, C, stays(call, dtype))


def _states(chunk: Chunk, A: Tensor, before: Tensor, block: Block) -> tuple[Tensor, list[Tensor]]:
    """The states (l r n c) of a block, and the products of its decays; ``before`` (r n c) is the incoming state."""
    dt = block.cut(chunk.dt)
    decay = torch.mul(dt[:, :, None], block.states(A)).exp_()
    if chunk.stays is not None:
        decay.mul_(chunk.stays[:, block.rows])
    h = chunk.B[:, block.rows, :, None] * (dt * block.cut(chunk.x))[:, :, None]
    h[0].addcmul_(decay[0], block.states(before))
    levels = products(decay)
    scan_(levels, h)
    return h, levels


def _backward_block(
    chunk: Chunk, A: Tensor, before: Tensor, dout: Tensor, dstate: Tensor, block: Block, sums: Sums
) -> None:
    """Put a block's gradients into ``sums``, and turn its part of ``dstate`` (r n c) into that of the state before it."""
    h, levels = _states(chunk, A, before, block)
    x, dt, dy = (block.cut(z) for z in (chunk.x, chunk.dt, dout))
    B, C = chunk.B[:, block.rows], chunk.C[:, block.rows]
    dstate = block.states(dstate)
    spare = h * dy[:, :, None]
    sums.C[:, block.rows] += spare.sum(-1)
    # The gradient of each state: what its own token reads, and what the next state hands back (p).
    dh = torch.mul(C[..., None], dy[:, :, None], out=spare)
    dh[-1] += dstate
    p = levels[0] * dh
    scan_back_(levels, p)
    dh[:-1] += p[1:]
    dstate.copy_(p[0])
    written = dt * x
    dwritten = (B[:, :, None] @ dh)[:, :, 0]
    sums.B[:, block.rows] += dh.mul_(written[:, :, None]).sum(-1)
    # From here p is the gradient of the exponent dt A: the decay's own factor is in it already.
    p[1:] *= h[:-1]
    p[0] *= block.states(before)
    block.cut(sums.x).copy_(dwritten * dt)
    block.cut(sums.dt).copy_(torch.mul(p, block.states(A), out=h).sum(2).addcmul_(dwritten, x))
    block.states(sums.A).add_(p.mul_(dt[:, :, None]).sum(0))
