"""Both passes of ``selective_scan_chunked``, outside autograd. README.md has the derivation.

Axes: b batch, t time, r rows (batch by groups), l places of a chunk, n states a channel, c channels of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.selective_scan.blocks import Block, Call, blocks_of
from hybridtf.ops.selective_scan.tree import products, scan_, scan_back_


class Chunk(NamedTuple):
    """What both passes read of a chunk, in the precision of the state."""

    x: Tensor  # (l r c)
    dt: Tensor  # (l r c)
    B: Tensor  # (l r n)
    C: Tensor  # (l r n)
    stays: Tensor | None  # (l r 1 1)


class Sums(NamedTuple):
    """Gradients that both passes over blocks add up: of a chunk's inputs, and of A over all chunks."""

    x: Tensor  # (l r c)
    dt: Tensor  # (l r c)
    B: Tensor  # (l r n)
    C: Tensor  # (l r n)
    A: Tensor  # (r n c)


def forward(call: Call, state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (b t c), the final state (r n c), and the state before each chunk, stacked (none unless ``keep``).

    ``state`` (r n c) is the incoming one. Results are contiguous and share no memory with an input.
    """
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    befores = state.new_empty(call.count_chunks() if keep else 0, *state.shape)
    state = state.clone(memory_format=torch.contiguous_format)
    A = call.by_row(call.A, state.dtype)
    D = None if call.D is None else call.by_row(call.D, state.dtype)
    for i, places in enumerate(call.chunks()):
        if keep:
            befores[i] = state
        chunk = _load(call, places, state.dtype)
        out = torch.empty_like(chunk.x)
        for block in blocks_of(out.shape, A.shape[1], out.device):
            h, _ = _states(chunk, A, state, block)
            block.cut(out).copy_((chunk.C[:, block.rows, None] @ h)[:, :, 0])
            block.states(state).copy_(h[-1])
        if D is not None:
            out.addcmul_(D, chunk.x)
        y[:, places] = call.unload(out, y)
    if call.real is not None:
        y.masked_fill_(~call.real[..., None], 0)
    return y, state, befores


def backward(call: Call, befores: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D (a scalar without D) and of the incoming state, given those of y and of the last one."""
    dtype = dstate.dtype
    grads = [torch.empty(z.shape, dtype=z.dtype, device=z.device) for z in (call.x, call.dt, call.B, call.C)]
    dstate = dstate.clone(memory_format=torch.contiguous_format)
    A = call.by_row(call.A, dtype)
    D = None if call.D is None else call.by_row(call.D, dtype)
    dA, dD = torch.zeros_like(A), A.new_zeros(A.shape[0], A.shape[2])
    for places, before in reversed(list(zip(call.chunks(), befores, strict=True))):
        chunk, dout = _load(call, places, dtype), call.load(dy, places, dtype)
        dx, ddt, dB, dC = (torch.zeros_like(z) for z in (chunk.x, chunk.dt, chunk.B, chunk.C))
        sums = Sums(dx, ddt, dB, dC, dA)
        for block in blocks_of(dout.shape, A.shape[1], dout.device):
            _backward_block(chunk, A, before, dout, dstate, block, sums)
        if D is not None:
            sums.x.addcmul_(D, dout)
            dD += (dout * chunk.x).sum(0)
        if call.real is not None:
            # A pad has no time step, but its state has decays around it: what they give is no gradient of the pad.
            sums.dt.view(len(dout), *call.rows, -1).masked_fill_(~call.real[:, places].T[..., None, None], 0)
        for grad, part in zip(grads, sums[:4], strict=True):
            grad[:, places] = call.unload(part, grad)
    of_D = dD.new_zeros(()) if call.D is None else call.over_batch(dD, call.D)
    return *grads[:2], call.over_batch(dA, call.A), *grads[2:], of_D, dstate


def _load(call: Call, places: slice, dtype: torch.dtype) -> Chunk:
    x, dt, B, C = (call.load(z, places, dtype) for z in (call.x, call.dt, call.B, call.C))
    return Chunk(x, dt, B, C, call.stays(places, dtype))


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
