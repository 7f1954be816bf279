"""One token of ``state_space``: the decode step, with no tables of powers. Axes: b batch, c channels, s state."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.state_space.shapes import System, advance, read, written


def state_space_step(u: Tensor, system: System, state: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked: u (b 1 c), and the state (b c s) as ``start_joined`` gives it.

    Returns y (b 1 c) in u's dtype and the new state.
    """
    dtype = state.dtype
    system = System(system.form, *(tuple(x.to(dtype) for x in part) for part in system[1:]))
    now = mask_pads(u, segments)[:, 0].to(dtype)
    new = advance(state, system) + now[..., None] * written(system)
    if segments is not None:
        new = torch.where(segments.real[:, 0, None, None], new, state)
    y = (new * read(system)).sum(-1)[:, None]
    return mask_pads(y, segments).to(u.dtype), new
