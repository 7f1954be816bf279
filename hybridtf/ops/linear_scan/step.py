"""One token of ``linear_scan``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch

from hybridtf.ops.linear_scan.shapes import Arguments, Parts, factor, product, spread


def linear_scan_step(args: Arguments, state: Parts) -> tuple[Parts, Parts]:
    """The op for t = 1, arguments checked: u (b 1 c), the factor (b 1 c) or (c), and the state's parts (b c).

    The state is as :func:`start_state` gives it: already forgotten where a document begins. Returns the states (b 1 c) and
    the last one.
    """
    timed = args.decay[0].ndim == args.u[0].ndim
    u = tuple(x[:, 0].to(args.dtype) for x in args.u)
    decay = tuple((x[:, 0] if timed else x).to(args.dtype) for x in args.decay)
    real = None if args.segments is None else spread(args.segments.real[:, 0], u[0])
    if real is not None:
        u = tuple(x.masked_fill(~real, 0) for x in u)
        decay = tuple(x.masked_fill(~real, 0) for x in decay)
    new = tuple(x + y for x, y in zip(u, product(factor(decay, args.log), state), strict=True))
    if real is not None:
        new = tuple(torch.where(real, x, y) for x, y in zip(new, state, strict=True))
    return tuple(x[:, None] for x in new), new
