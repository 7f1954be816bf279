"""One token of ``slstm``, and a loop over tokens: plain enough for TorchScript, which compiles both.

Axes: t time, h heads, b batch, p channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cell(
    x: Tensor, weight: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The state after a token, from its share of the gates ``x`` (h b 4p), ``weight`` (h p 4p), and the state, each (h b p)."""
    i, f, z, o = (x + torch.bmm(h, weight)).chunk(4, -1)
    kept = F.logsigmoid(f) + m
    # n is at least 1 once a token was written: at 0 there is nothing to keep, and no maximum yet.
    empty = n == 0
    top = torch.where(empty, i, torch.maximum(i, kept))
    keep = torch.exp((kept - top).masked_fill(empty, -torch.inf))
    write = torch.exp(i - top)
    c = keep * c + write * torch.tanh(z)
    n = keep * n + write
    return torch.sigmoid(o) * c / n, c, n, top


def walk(
    x: Tensor, weight: Tensor, starts: Tensor | None, real: Tensor | None, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs (t h b p) and the last state of tokens ``x`` (t h b 4p), one after another; ``starts``, ``real`` (t b 1)."""
    out: list[Tensor] = []
    for t in range(x.shape[0]):
        before = h, n
        if starts is not None:
            h, n = h.masked_fill(starts[t], 0), n.masked_fill(starts[t], 0)
        new_h, new_c, new_n, new_m = cell(x[t], weight, h, c, n, m)
        out.append(new_h)
        if real is not None:
            new_h, new_n = torch.where(real[t], new_h, before[0]), torch.where(real[t], new_n, before[1])
            new_c, new_m = torch.where(real[t], new_c, c), torch.where(real[t], new_m, m)
        h, c, n, m = new_h, new_c, new_n, new_m
    return torch.stack(out), h, c, n, m
