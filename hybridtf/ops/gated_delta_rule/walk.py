"""The state of ``gated_delta_rule`` from chunk to chunk, and its gradients by hand. README.md has the derivation.

Axes: c chunks, B = b h, l tokens of a chunk, L rows of it, k key width, p value width; d is 1 or k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.gated_delta_rule.inverse import unit_inverse


class Parts(NamedTuple):
    """What the tokens of the chunks make by themselves."""

    system: Tensor  # (c B L L), strictly lower
    weights: Tensor  # (c B l L)
    of_keys: Tensor  # (c B L k)
    of_queries: Tensor  # (c B l k)
    values: Tensor  # (c B L p)
    written: Tensor  # (c B L k)
    decay: Tensor  # (c B d 1)


def walk(parts: Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """In each chunk, from the state S (B k p) before it:

        C = (I + system)^-1 (values + of_keys S),   y = of_queries S + weights C,   S' = decay S + writtenᵀ C

    Returns y (c B l p) and the state after the last chunk.
    """
    apply: Any = _Walk.apply
    y, last = apply(*parts, state)
    return y, last


class _Walk(torch.autograd.Function):
    """What can be is one product over all chunks; with T the inverse and dX = Tᵀ dC, that of the system is -dX Cᵀ."""

    @staticmethod
    def forward(
        ctx: Any, system: Tensor, weights: Tensor, of_keys: Tensor, of_queries: Tensor, values: Tensor, written: Tensor,
        decay: Tensor, state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inverse = unit_inverse(system)
        before, corrections = state.new_empty(len(values), *state.shape), torch.empty_like(values)
        for i, (solve, value, read, write, keep) in enumerate(zip(inverse, values, of_keys, written, decay, strict=True)):
            before[i] = state
            torch.bmm(solve, torch.baddbmm(value, read, state), out=corrections[i])
            state = torch.baddbmm(keep * state, write.mT, corrections[i])
        read = of_queries.flatten(0, 1) @ before.flatten(0, 1)
        y = torch.baddbmm(read, weights.flatten(0, 1), corrections.flatten(0, 1))
        ctx.save_for_backward(weights, of_keys, of_queries, written, decay, inverse, before, corrections)
        return y.unflatten(0, values.shape[:2]), state

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        weights, of_keys, of_queries, written, decay, inverse, before, corrections = ctx.saved_tensors
        shape = dy.shape[:2]
        flat = [x.flatten(0, 1) for x in (dy, weights, of_queries, before, corrections)]
        dy, weights, of_queries, before_m, corrections_m = flat
        dcorrections = (weights.mT @ dy).unflatten(0, shape)
        dbefore = (of_queries.mT @ dy).unflatten(0, shape)
        after, dvalues = torch.empty_like(before), torch.empty_like(dcorrections)
        for i in reversed(range(len(after))):
            after[i] = dstate
            torch.bmm(inverse[i].mT, torch.baddbmm(dcorrections[i], written[i], dstate), out=dvalues[i])
            dstate = torch.baddbmm(torch.addcmul(dbefore[i], dstate, decay[i]), of_keys[i].mT, dvalues[i])
        ddecay = (after * before).sum(-1, keepdim=True)
        ddecay = ddecay.sum(-2, keepdim=True) if decay.shape[-2] == 1 else ddecay
        dvalues_m = dvalues.flatten(0, 1)
        found = (
            -dvalues_m @ corrections_m.mT, dy @ corrections_m.mT, dvalues_m @ before_m.mT, dy @ before_m.mT, dvalues_m,
            corrections_m @ after.flatten(0, 1).mT,
        )
        return (*(x.unflatten(0, shape) for x in found), ddecay, dstate)
