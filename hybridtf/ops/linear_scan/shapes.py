"""What every form of the op checks before it computes, and how real numbers and (re, im) pairs become one case.

Axes: b batch, t time, c channels (any number of axes, at least one).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments
from hybridtf.ops.documents import start_state, state_dtype

Parts: TypeAlias = tuple[Tensor, ...]
"""One tensor of real numbers, or two: real and imaginary parts."""

Number: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What a caller gives and gets: a real tensor, or a pair."""


class Arguments(NamedTuple):
    """The arguments of a call, checked."""

    u: Parts
    decay: Parts
    log: bool
    """``decay`` is the logarithm of the factor, not the factor."""
    initial_state: Parts | None
    segments: Segments | None

    @property
    def dtype(self) -> torch.dtype:
        """Of states and factors: float32, or float64 where an input is float64."""
        return state_dtype(*self.u, *self.decay)


def check(
    u: Number, log_a: Number | None, a: Number | None, initial_state: Number | None, segments: Segments | None
) -> Arguments:
    """The arguments as parts; raises :class:`ConfigError` where they do not fit together."""
    if (log_a is None) == (a is None):
        given = "neither" if a is None else "both"
        raise ConfigError(f"linear_scan: give log_a or a, one of them; got {given}")
    name, decay = ("a", a) if log_a is None else ("log_a", log_a)
    parts, factor = _parts("u", u), _parts(name, decay)
    shape = parts[0].shape
    if len(shape) < 3:
        raise ConfigError(f"linear_scan: u must be (b t ...channels); got {tuple(shape)}")
    if len(factor) != len(parts):
        raise ConfigError(f"linear_scan: u and {name} must both be tensors or both be (re, im) pairs")
    if factor[0].shape not in (shape, shape[2:]):
        allowed = f"{tuple(shape)}, or {tuple(shape[2:])} for all rows and times"
        raise ConfigError(f"linear_scan: {name} must be {allowed}; got {tuple(factor[0].shape)}")
    state = None if initial_state is None else _parts("initial_state", initial_state)
    if state is not None and (len(state) != len(parts) or state[0].shape != (shape[0], *shape[2:])):
        wanted = f"{'a pair of ' if len(parts) == 2 else ''}(b ...channels) = {(shape[0], *shape[2:])}"
        raise ConfigError(f"linear_scan: initial_state must be {wanted}; got {[tuple(x.shape) for x in state]}")
    check_segments("linear_scan", segments, *shape[:2])
    return Arguments(parts, factor, a is None, state, segments)


def _parts(name: str, value: Number | None) -> Parts:
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(x, Tensor) for x in parts) or len(parts) not in (1, 2):
        raise ConfigError(f"linear_scan: {name} must be a tensor or a (re, im) pair of tensors")
    if any(not x.is_floating_point() for x in parts):  # type: ignore[union-attr]
        raise ConfigError(f"linear_scan: {name} must hold floating numbers; complex ones come as a (re, im) pair")
    if any(x.shape != parts[0].shape for x in parts):  # type: ignore[union-attr]
        raise ConfigError(f"linear_scan: both parts of {name} must have one shape")
    return parts  # type: ignore[return-value]


def number(parts: Parts) -> Number:
    """The tensor, or the pair."""
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def start_parts(args: Arguments) -> Parts:
    """The incoming state's parts (b c): zeros where there is none, and in rows that begin another document."""
    given = args.initial_state or (None,) * len(args.u)
    shape = (args.u[0].shape[0], *args.u[0].shape[2:])
    return tuple(start_state(x, shape, like, args.dtype, args.segments) for x, like in zip(given, args.u, strict=True))


def spread(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over the leading axes of ``like``, with axes of size 1 for the others."""
    return mask.view(*mask.shape, *[1] * (like.ndim - mask.ndim))


def factor(decay: Parts, log: bool) -> Parts:
    """The factor a from ``decay``: itself, or the exponential of its logarithm (log |a|, and the phase of a pair)."""
    if not log:
        return decay
    size = decay[0].exp()
    return (size,) if len(decay) == 1 else (size * decay[1].cos(), size * decay[1].sin())


def product(a: Parts, h: Parts) -> Parts:
    """a h, of real numbers or of pairs."""
    if len(a) == 1:
        return (a[0] * h[0],)
    return a[0] * h[0] - a[1] * h[1], a[0] * h[1] + a[1] * h[0]
