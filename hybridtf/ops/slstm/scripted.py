"""``slstm`` with its loop over tokens compiled by TorchScript, a chunk of tokens at a time. README.md says why.

Axes: b batch, t time, h heads, p channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.slstm.cell import cell
from hybridtf.ops.slstm.loop import Walk
from hybridtf.ops.slstm.shapes import STATES, masked, start
from hybridtf.ops.span_op import span_op


def _span(call: Call, state: States) -> tuple[Tensor, States]:
    """The outputs (b t h p) of some tokens, and the state after them."""
    starts = real = None
    if call.masks is not None:
        starts, real = (mask.t()[..., None] for mask in (call.masks.starts & call.masks.real, call.masks.real))
    x = call["x"].permute(1, 2, 0, 3)  # [t, h, b, 4p]
    walked: Any = Walk.apply
    y, *last = walked(x, call["weight_hh"], starts, real, *(s.transpose(0, 1) for s in state))
    return y.permute(2, 0, 1, 3), tuple(s.transpose(0, 1) for s in last)


_OP = span_op(
    "slstm", _span, timed=("x",), fixed=("weight_hh",), length=lambda call: call["chunk_size"],
    like=lambda call: ((*call["x"].shape[:3], call["x"].shape[3] // 4), call["x"].dtype),
)


def slstm_scripted(
    x: Tensor, weight_hh: Tensor, *, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The recurrence of :func:`slstm_reference`; same arguments, results and errors.

    ``chunk_size`` tokens are computed again at a time for their gradients. Second derivatives raise :class:`KernelError`.
    """
    state = start(x, weight_hh, initial_state, segments, chunk_size)
    dtype = state[0].dtype
    given, weight = masked(x, segments, dtype), weight_hh.to(dtype)
    if x.shape[1] != 1:
        y, state = _OP((given,), (weight,), (chunk_size,), segments, state)
        return y.to(x.dtype), dict(zip(STATES, state, strict=True))
    with no_autocast(x.device):
        new = cell(given[:, 0].transpose(0, 1), weight, *(s.transpose(0, 1) for s in state))
    # Laid out as it came, so that a compiler finds every step alike.
    after = tuple(s.transpose(0, 1).contiguous() for s in new)
    if segments is not None:
        after = tuple(torch.where(segments.real[..., None], s, old) for s, old in zip(after, state, strict=True))
    return mask_pads(after[0][:, None], segments).to(x.dtype), dict(zip(STATES, after, strict=True))
