"""Auxiliary losses of a router, as (sum, count) over real tokens. README.md of channel_mixers says how they reduce.

Axes: b rows, t time, n = b t tokens, e experts, k chosen experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybridtf.core import Segments


def z_loss(logits: Tensor, segments: Segments | None) -> Tensor:
    """Sum over real tokens of logsumexp(logits)^2 (ST-MoE, https://arxiv.org/abs/2202.08906); ``logits`` (n e)."""
    squares = logits.logsumexp(-1).square()
    return squares.sum() if segments is None else squares.masked_fill(~segments.real.flatten(), 0).sum()


def balance_loss(
    probs: Tensor, experts: Tensor, shape: tuple[int, int], segments: Segments | None, over: Literal["document", "call"]
) -> Tensor:
    """Sum over real tokens i of e * sum_j f_j p_ij, where f_j is the share of tokens that chose expert j.

    ``probs`` (n e); ``experts`` (n k), the number e standing for none; ``shape`` is (b, t). The share is that of the
    token's document in this call, or of all tokens of the call (Switch, https://arxiv.org/abs/2101.03961). It has no
    gradient, and its k choices a token sum to k: with even loads the mean of the loss over tokens is k.
    """
    n, n_experts = probs.shape
    real = None if segments is None else segments.real.flatten()
    with torch.no_grad():
        chosen = torch.zeros(n, n_experts + 1, dtype=probs.dtype, device=probs.device).scatter(1, experts, 1.0)[:, :-1]
        if over == "call":
            count = chosen.new_full((), n) if real is None else real.sum().to(chosen.dtype)
            share = chosen.sum(0) / count.clamp(min=1)
        elif segments is None:
            b, t = shape
            share = chosen.view(b, t, n_experts).sum(1, keepdim=True) / max(t, 1)
            share = share.expand(b, t, n_experts).reshape(n, n_experts)
        else:
            share = _document_share(chosen, segments)
    losses = n_experts * (probs * share).sum(-1)
    return losses.sum() if real is None else losses.masked_fill(~real, 0).sum()


def _document_share(chosen: Tensor, segments: Segments) -> Tensor:
    """(n e): for each token, the share of its document's tokens that chose each expert."""
    b, t = segments.ids.shape
    first = segments.real & (segments.position == 0)
    place = first.long().cumsum(1) + torch.arange(b, device=chosen.device)[:, None] * (t + 1)
    place = place.flatten()
    real = segments.real.flatten().to(chosen.dtype)
    tokens = real.new_zeros(b * (t + 1)).index_add(0, place, real)
    loads = chosen.new_zeros(b * (t + 1), chosen.shape[1]).index_add(0, place, chosen)
    return loads[place] / tokens[place].clamp(min=1)[:, None]
