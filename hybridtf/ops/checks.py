"""What ops check of their arguments alike. Each raises :class:`ConfigError` naming the op, the argument and what is allowed.

Axes: b batch, t time.
"""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments


def check_shape(op: str, name: str, x: Tensor | None, axes: str, wanted: tuple[int, ...]) -> None:
    """``x``, where it is given, has the shape ``wanted``, whose axes are called ``axes``."""
    if x is not None and x.shape != wanted:
        raise ConfigError(f"{op}: {name} must be {axes} = {wanted}; got {tuple(x.shape)}")


def check_segments(op: str, segments: Segments | None, b: int, t: int) -> None:
    """``segments``, where they are given, are those of b rows of t tokens."""
    if segments is not None:
        check_shape(op, "segments", segments.ids, "(b t)", (b, t))


def check_count(op: str, name: str, count: int) -> None:
    """``count`` is 1 or more."""
    if count < 1:
        raise ConfigError(f"{op}: {name} must be 1 or more; got {count}")
