"""One token of ``ttt_linear``: the decode step, with no chunk machinery.

Axes: b batch, h heads, p channels of a head, r = p + 1 rows of a memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.ttt.norm import loss_gradient, norm
from hybridtf.ops.ttt.shapes import State


def ttt_step(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, fixed: Mapping[str, Tensor], eps: float, state: State
) -> tuple[Tensor, State]:
    """A token of every row, none of them a pad: q, k, v (b h p), lr (b h), all in the state's dtype. The state is already
    forgotten where a document begins. Returns y (b h p) and the new state.
    """
    weight, bias, scale, (W, dW, n) = fixed["norm_weight"], fixed["norm_bias"], fixed["scale"], state.values()
    start = torch.cat([fixed["W0"], fixed["b0"][:, None]], 1)
    q_row, k_row = (F.pad(x, (0, 1), value=1.0)[..., None, :] for x in (q, k))
    g = loss_gradient((k_row @ W + k_row @ start)[..., 0, :], v - k, weight, bias, eps) * lr[..., None]
    dW = torch.addcmul(dW, k_row.mT, g[..., None, :])
    rate = scale[n][:, None, None, None]
    z = q_row @ W + q_row @ start - rate * (q_row @ dW)
    y = q + norm(z[..., 0, :], weight, bias, eps)
    whole = (n == len(scale) - 1)[:, None, None, None]
    after = torch.where(whole, W - scale[-1] * dW, W)
    return y, {"W": after, "dW": dW.masked_fill(whole, 0), "n": (n + 1) % len(scale)}
