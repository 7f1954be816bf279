"""Inputs and comparisons for the tests of ``linear_scan``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FORMS = [(pair, log, timeless) for pair in (False, True) for log in (False, True) for timeless in (False, True)]
"""Real or complex; the logarithm of the factor or itself; one factor a token or one for all."""


class Inputs(NamedTuple):
    """Parts of a call: one tensor each, or two for complex numbers."""

    u: tuple[Tensor, ...]
    decay: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    log: bool

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (*self.u, *self.decay, *self.state)

    def narrow(self, start: int, stop: int) -> Inputs:
        """The same call for some columns."""
        timed = self.decay[0].ndim == self.u[0].ndim
        decay = tuple(x[:, start:stop] for x in self.decay) if timed else self.decay
        return self._replace(u=tuple(x[:, start:stop] for x in self.u), decay=decay)

    def map(self, fn) -> Inputs:
        return Inputs(*(tuple(fn(x) for x in part) for part in self[:3]), self.log)


def number(parts):
    return parts[0] if len(parts) == 1 else tuple(parts)


def parts(value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def inputs(
    seed: int, b: int, t: int, *channels: int, pair: bool = False, log: bool = True, timeless: bool = False,
    dtype: torch.dtype = torch.float64, rate: float = 1.0,
) -> Inputs:
    gen = torch.Generator().manual_seed(seed)
    channels = channels or (3,)
    n = 2 if pair else 1

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    u, state = ([randn(*shape) for _ in range(n)] for shape in ((b, t, *channels), (b, *channels)))
    decay = [randn(*(channels if timeless else (b, t, *channels))) for _ in range(n)]
    if log:
        decay[0] = -decay[0].abs() * rate
    else:
        decay = [x.tanh() / n**0.5 for x in decay]
    return Inputs(tuple(u), tuple(decay), tuple(state), log).map(lambda x: x.to(dtype).requires_grad_())


def call(op, x: Inputs, *, given: bool = True, **more) -> tuple[Tensor, ...]:
    """All parts of the states, then of the last ones."""
    state = {"initial_state": number(x.state)} if given else {}
    h, last = op(number(x.u), **{"log_a" if x.log else "a": number(x.decay)}, **state, **more)
    return (*parts(h), *parts(last))


def grads(out: tuple[Tensor, ...], x: Inputs, seed: int = 0, *, again: bool = False) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    loss = sum((y.double() * torch.randn(y.shape, generator=gen, dtype=torch.float64)).sum() for y in out)
    found = torch.autograd.grad(loss, x.leaves, allow_unused=True, retain_graph=again)
    return tuple(torch.zeros_like(a) if f is None else f for a, f in zip(x.leaves, found, strict=True))


def assert_same(x: Inputs, first, second, tol: float = 1e-10) -> None:
    """``second`` may serve for several comparisons."""
    for a, b in zip((*first, *grads(first, x)), (*second, *grads(second, x, again=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
