"""``linear_scan`` by sweeps over chunks side by side, in time and memory linear in the length. README.md has the derivation.

Axes: b batch, t time, c channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.linear_scan.flops import backward_flops, forward_flops
from hybridtf.ops.linear_scan.passes import backward, forward
from hybridtf.ops.linear_scan.shapes import Arguments, Number, Parts, check, number, start_parts
from hybridtf.ops.linear_scan.step import linear_scan_step
from hybridtf.ops.passes_op import Call, passes_op


def linear_scan_chunked(
    u: Number, log_a: Number | None = None, *, a: Number | None = None, initial_state: Number | None = None,
    segments: Segments | None = None,
) -> tuple[Number, Number]:
    """The recurrence of :func:`linear_scan_reference` without a loop over time; same arguments, results and errors.

    States are float32 at least, what passes from chunk to chunk is float64. The backward keeps the states, which are the
    result, and the factor. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    args = check(u, log_a, a, initial_state, segments)
    shape = args.u[0].shape
    with no_autocast(args.u[0].device):
        state = start_parts(args)
        if shape[1] == 1:
            h, last = linear_scan_step(args, state)
        else:
            h, last = _run(args, state)
    return number(h), number(last)


def _run(args: Arguments, state: Parts) -> tuple[Parts, Parts]:
    b, t, *channels = args.u[0].shape
    c = math.prod(channels)
    flat = [x.reshape(b, t, c) for x in args.u]
    decay = [x.reshape(b, t, c) if x.ndim == args.u[0].ndim else x.reshape(c) for x in args.decay]
    start = [x.reshape(b, c) for x in state]
    h, last = _OP((*flat, None)[:2], (*decay, None)[:2], (args.log,), args.segments, start)
    parts = (h,) if len(flat) == 1 else h.unbind(0)  # no unbind of one: its gradient is a copy
    return tuple(x.view(b, t, *channels) for x in parts), tuple(x.view(b, *channels) for x in last)


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    """All states, parts first."""
    u, decay = call["u"], call["decay"]
    return (1 if call["u_im"] is None else 2, *u.shape), state_dtype(u, call["u_im"], decay, call["decay_im"])


_OP = passes_op(
    "linear_scan", forward, backward, timed=("u", "u_im?"), fixed=("decay", "decay_im?"), options={"log": bool}, like=_like,
    unread=("u", "u_im"), useful=(forward_flops, backward_flops),
)
