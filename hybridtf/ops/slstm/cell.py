"""One token of ``slstm``, and loops over tokens in both directions: plain enough for TorchScript, which compiles them.

Axes: t time, h heads, b batch, p channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weights(i: Tensor, f: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From gates i, f and the n, m before them: log of what f leaves, the new maximum, what is kept, what is written."""
    kept = F.logsigmoid(f) + m
    # n is at least 1 once a token was written: at 0 there is nothing to keep, and no maximum yet.
    empty = n == 0
    top = torch.where(empty, i, torch.maximum(i, kept))
    return kept, top, torch.exp((kept - top).masked_fill(empty, -torch.inf)), torch.exp(i - top)


def cell(
    x: Tensor, weight: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The state after a token, from its share of the gates ``x`` (h b 4p), ``weight`` (h p 4p), and the state, each (h b p)."""
    i, f, z, o = (x + torch.bmm(h, weight)).chunk(4, -1)
    _, top, keep, write = weights(i, f, n, m)
    c = keep * c + write * torch.tanh(z)
    n = keep * n + write
    return torch.sigmoid(o) * c / n, c, n, top


def walk(
    x: Tensor, weight: Tensor, starts: Tensor | None, real: Tensor | None, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states h, c, n, m (t h b p) after each of the tokens ``x`` (t h b 4p); ``starts``, ``real`` (t b 1) bool."""
    out_h: list[Tensor] = []
    out_c: list[Tensor] = []
    out_n: list[Tensor] = []
    out_m: list[Tensor] = []
    for t in range(x.shape[0]):
        old_h, old_n = h, n
        if starts is not None:
            old_h, old_n = h.masked_fill(starts[t], 0), n.masked_fill(starts[t], 0)
        new_h, new_c, new_n, new_m = cell(x[t], weight, old_h, c, old_n, m)
        if real is not None:
            new_h, new_c = torch.where(real[t], new_h, h), torch.where(real[t], new_c, c)
            new_n, new_m = torch.where(real[t], new_n, n), torch.where(real[t], new_m, m)
        h, c, n, m = new_h, new_c, new_n, new_m
        out_h.append(h)
        out_c.append(c)
        out_n.append(n)
        out_m.append(m)
    return torch.stack(out_h), torch.stack(out_c), torch.stack(out_n), torch.stack(out_m)


def walk_back(
    dy: Tensor, weight: Tensor, starts: Tensor | None, real: Tensor | None, slopes: list[Tensor],
    dh: Tensor, dc: Tensor, dn: Tensor, dm: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all gates (t h b 4p) and of the state before, from those of h (t h b p) and of the last state.

    ``slopes``: what does not depend on later tokens, each (t h b p), in the order of :func:`slopes_of` (README.md).
    """
    out: list[Tensor] = []
    to_o, to_c, to_n, from_c, from_n, from_z, write, to_z, share, to_f, keep = slopes
    back = weight.transpose(1, 2)
    for t in range(dy.shape[0] - 1, -1, -1):
        g = dh + dy[t]
        new_c, new_n = torch.addcmul(dc, g, to_c[t]), torch.addcmul(dn, g, to_n[t])
        kept = torch.addcmul(new_c * from_c[t], new_n, from_n[t])
        given = torch.addcmul(new_c * from_z[t], new_n, write[t])
        top = dm - kept - given
        chosen = top * share[t]
        kept, given = kept + chosen, given + (top - chosen)
        gates = torch.cat([given, kept * to_f[t], new_c * to_z[t], g * to_o[t]], -1)
        new_c, new_n = new_c * keep[t], new_n * keep[t]
        if real is not None:
            gates = gates.masked_fill(~real[t], 0)
        new_h = torch.bmm(gates, back)
        if starts is not None:
            new_h = new_h.masked_fill(starts[t], 0)
        if real is not None:
            new_h, new_c = torch.where(real[t], new_h, g), torch.where(real[t], new_c, dc)
            new_n, kept = torch.where(real[t], new_n, dn), torch.where(real[t], kept, dm)
        dh, dc, dn, dm = new_h, new_c, new_n, kept
        out.append(gates)
    out.reverse()
    return torch.stack(out), dh, dc, dn, dm
