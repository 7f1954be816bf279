"""One token of ``titans``: the decode step, with no chunk machinery.

Axes: b batch, h heads, k key width, v value width, n numbers of a memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.ops.titans.memory import gradient, join, read, split
from hybridtf.ops.titans.shapes import State


def titans_step(
    token: Sequence[Tensor], M0: Tensor, shapes: Sequence[tuple[int, int]], mini_batch: int, state: State
) -> tuple[Tensor, State]:
    """A token of every row, none of them a pad: q, k (b h k), v (b h v), theta, log_eta, log_a (b h); M0 (h n); all in the
    state's dtype. The state is already forgotten where a document begins. Returns y (b h v) and the new state.
    """
    q, k, v, theta, log_eta, log_a = token
    M, S, base, n = (state[name] for name in ("M", "S", "base", "n"))
    q, k, v = (x.flatten(0, 1)[:, None] for x in (q, k, v))
    inputs, deltas = gradient(split((base + M0).flatten(0, 1), shapes), k, v)
    surprise = join([torch.bmm(x.mT, d) for x, d in zip(inputs, deltas, strict=True)]).view_as(S)
    S = log_eta.exp()[..., None] * S - theta[..., None] * surprise
    # The state is what the memory has beyond M0, and M0 is forgotten too.
    M = log_a.exp()[..., None] * M + torch.expm1(log_a)[..., None] * M0 + S
    y = read(split((M + M0).flatten(0, 1), shapes), q)
    whole = (n == mini_batch - 1)[:, None, None]
    return y.view(*theta.shape, -1), {"M": M, "S": S, "base": torch.where(whole, M, base), "n": (n + 1) % mini_batch}
