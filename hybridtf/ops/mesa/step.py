"""One token of ``mesa``: the decode step, with no chunk machinery.

Axes: b batch, h heads, k key width, v value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.mesa.solve import conjugate_gradients


def mesa_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, ridge: Tensor, state: Tensor, segments: Segments | None,
    n_steps: int,
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked. The state (b h k k+v) is as :func:`start_state` gives it: already forgotten where a
    document begins; its dtype is the precision. Returns y (b 1 h v) in v's dtype and the new state."""
    n, dtype = k.shape[3], state.dtype
    q_t, k_t, v_t, beta_t, a_t = (mask_pads(x, segments)[:, 0].to(dtype) for x in (q, k, v, beta, log_a))
    pair = (beta_t[..., None] * k_t)[..., :, None] * torch.cat([k_t, v_t], -1)[..., None, :]
    new = torch.addcmul(pair, state, a_t.exp()[..., None, None])
    matrix = new[..., :n] + torch.diag_embed(ridge.to(dtype))
    best = conjugate_gradients(lambda x: (matrix @ x[..., None])[..., 0], q_t, n_steps)
    if torch.is_grad_enabled():  # the number of the steps taken, with the gradients of the solution
        best = best.detach()
        correction = torch.linalg.solve(matrix.detach(), q_t - (matrix @ best[..., None])[..., 0])
        best = best + (correction - correction.detach())
    y = (best[..., None, :] @ new[..., n:])[..., 0, :]
    return mask_pads(y[:, None], segments).to(v.dtype), new
