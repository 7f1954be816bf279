"""The loops of ``slstm`` over a chunk of tokens, compiled, as a function of autograd. README.md has the derivation.

Axes: t time, h heads, b batch, p channels of a head.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.slstm.cell import walk, walk_back, weights


@functools.cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop as TorchScript, compiled at the first call."""
    with warnings.catch_warnings():
        # torch points to torch.compile, which would unroll the loop.
        warnings.simplefilter("ignore", DeprecationWarning)
        script: Callable[..., Any] = torch.jit.script(loop)
    return script


def _run(loop: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    # Every call has other lengths, and what the optimiser learns of one is of no use to the next.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        found: tuple[Tensor, ...] = _compiled(loop)(*arguments)
    return found


class Walk(torch.autograd.Function):
    """h (t h b p) and the last h, c, n, m of tokens ``x`` (t h b 4p); arguments as those of :func:`walk`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor | None, real: Tensor | None, *state: Tensor) -> Any:
        every = _run(walk, x, weight, starts, real, *state)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, weight, starts, real, *state, *every)
        return (every[0], *(z[-1].clone() for z in every))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *dstate: Tensor) -> Any:
        x, weight, starts, real, *rest = ctx.saved_tensors
        h, c, n, m = (torch.cat([first[None], z[:-1]]) for first, z in zip(rest[:4], rest[4:], strict=True))
        if starts is not None:
            h, n = h.masked_fill(starts[:, None], 0), n.masked_fill(starts[:, None], 0)
        slopes = slopes_of(x + h @ weight, c, n, m)
        gates, *dbefore = _run(walk_back, dy, weight, starts, real, slopes, *dstate)
        dweight = h.permute(1, 3, 0, 2).flatten(2) @ gates.transpose(0, 1).flatten(1, 2)
        return (gates, dweight, None, None, *dbefore)


def slopes_of(gates: Tensor, c: Tensor, n: Tensor, m: Tensor) -> list[Tensor]:
    """What the walk back multiplies with, of all tokens at once: from the gates (t h b 4p) and the c, n, m before each."""
    i, f, z, o = gates.chunk(4, -1)
    kept, _, keep, write = weights(i, f, n, m)
    opened, content = torch.sigmoid(o), torch.tanh(z)
    from_c, from_n, from_z = keep * c, keep * n, write * content
    total = from_n + write
    average = (from_c + from_z) / total
    # The maximum is that of what is kept, or of i; of both, where they are equal.
    share = torch.where(n == 0, 0.0, 0.5 * (torch.sign(kept - i) + 1))
    return [
        average * opened * (1 - opened), opened / total, -opened * average / total, from_c, from_n, from_z, write,
        write * (1 - content.square()), share, F.sigmoid(-f), keep,
    ]
