"""What every form of the op checks before it computes, and the system in one real form.

Axes: b batch, t time, c channels, n states of a channel, s real numbers of its state (n, or 2 n where it is complex).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments
from hybridtf.ops.documents import start_state, state_dtype

Parts: TypeAlias = tuple[Tensor, ...]
Number: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""A real tensor, or a (re, im) pair."""


class System(NamedTuple):
    """A, B and C of every channel, checked: one part each where they are real, two where they are complex."""

    form: Literal["real", "complex", "dense"]
    a: Parts
    """(c n): log A of a diagonal A, or log |A| and its phase; (c n n): A itself where it is dense."""
    b: Parts
    c: Parts

    @property
    def width(self) -> int:
        """Real numbers of a channel's state."""
        return self.b[0].shape[1] * len(self.b)

    def double(self) -> System:
        """In float64, in which tables of powers are made."""
        a, b, c = (tuple(x.double() for x in part) for part in self[1:])
        return System(self.form, a, b, c)


def check(
    u: Tensor, b: Number, c: Number, log_a: Number | None, a: Tensor | None, initial_state: Number | None,
    segments: Segments | None, chunk_size: int,
) -> System:
    """The system; raises :class:`ConfigError` where the arguments do not fit together."""
    if u.ndim != 3:
        raise ConfigError(f"state_space: u must be (b t c); got {tuple(u.shape)}")
    if (log_a is None) == (a is None):
        given = "neither" if a is None else "both"
        raise ConfigError(f"state_space: give log_a or a, one of them; got {given}")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ConfigError(f"state_space: chunk_size must be a power of 2; got {chunk_size}")
    parts_b, parts_c = _parts("b", b), _parts("c", c)
    channels, n = u.shape[2], parts_b[0].shape[-1]
    name, factor = ("a", _parts("a", a)) if log_a is None else ("log_a", _parts("log_a", log_a))
    shapes: dict[str, tuple[Parts, tuple[int, ...]]] = {"b": (parts_b, (channels, n)), "c": (parts_c, (channels, n))}
    shapes[name] = (factor, (channels, n) if a is None else (channels, n, n))
    if initial_state is not None:
        shapes["initial_state"] = (_parts("initial_state", initial_state), (u.shape[0], channels, n))
    for key, (parts, wanted) in shapes.items():
        pairs = "a pair of " if len(factor) == 2 else ""
        if len(parts) != len(factor) or any(x.shape != wanted for x in parts):
            raise ConfigError(f"state_space: {key} must be {pairs}{wanted}; got {[tuple(x.shape) for x in parts]}")
    if a is not None and len(factor) == 2:
        raise ConfigError("state_space: a dense matrix a is real; a complex diagonal is given as log_a")
    check_segments("state_space", segments, *u.shape[:2])
    form: Literal["real", "complex", "dense"] = "dense" if log_a is None else "real" if len(factor) == 1 else "complex"
    return System(form, factor, parts_b, parts_c)


def _parts(name: str, value: Number | None) -> Parts:
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    if len(parts) not in (1, 2) or not all(isinstance(x, Tensor) and x.is_floating_point() for x in parts):
        raise ConfigError(f"state_space: {name} must be a tensor of floating numbers or a (re, im) pair of such")
    return parts  # type: ignore[return-value]


def start_joined(u: Tensor, system: System, initial_state: Number | None, segments: Segments | None) -> Tensor:
    """The incoming state (b c s), float32 at least: zeros where there is none, and in rows that begin another document."""
    dtype = state_dtype(u, *system.a, *system.b, *system.c)
    whole = None if initial_state is None else torch.cat(_parts("initial_state", initial_state), -1)
    return start_state(whole, (u.shape[0], u.shape[2], system.width), u, dtype, segments)


def as_given(state: Tensor, system: System) -> Number:
    """The state (b c s) as the caller has it: a tensor, or a pair."""
    if system.form != "complex":
        return state
    re, im = state.chunk(2, dim=-1)
    return re.contiguous(), im.contiguous()


def advance(state: Tensor, system: System) -> Tensor:
    """A h, of a state (b c s); the system in the state's dtype."""
    if system.form == "dense":
        return torch.einsum("bcm,cnm->bcn", state, system.a[0])
    size = system.a[0].exp()
    if system.form == "real":
        return state * size
    re, im = size * system.a[1].cos(), size * system.a[1].sin()
    x, y = state.chunk(2, dim=-1)
    return torch.cat([re * x - im * y, re * y + im * x], -1)


def written(system: System) -> Tensor:
    """B as it enters a state (c s)."""
    return torch.cat(system.b, -1)


def read(system: System) -> Tensor:
    """C as it reads a state (c s): the real part of C h."""
    return system.c[0] if len(system.c) == 1 else torch.cat([system.c[0], -system.c[1]], -1)
