"""What every form of the op checks before it computes, and the state that it begins with."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments
from hybridtf.ops.documents import memory_shape, start_state

LogLinearState: TypeAlias = tuple[Tensor, Tensor]
"""S (b m h n p), the levels 1 to m of each head, and the count (b) int64 of the document's tokens so far."""

MOST_LEVELS = 24


def check(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, level_scales: Tensor, initial_state: LogLinearState | None,
    segments: Segments | None, chunk_size: int,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:2] != v.shape[:2]:
        raise ConfigError(f"log_linear: k must be (b t g n) and v (b t h p); got {tuple(k.shape)} and {tuple(v.shape)}")
    (b, t, g, n), (h, p) = k.shape, v.shape[2:]
    if g == 0 or h % g:
        raise ConfigError(f"log_linear: the {h} heads of v must be a multiple of the {g} groups of k")
    if q.shape != k.shape:
        raise ConfigError(f"log_linear: q must have the shape of k {tuple(k.shape)}; got {tuple(q.shape)}")
    if log_a.shape != (b, t, h):
        raise ConfigError(f"log_linear: log_a must be (b t h) = {(b, t, h)}; got {tuple(log_a.shape)}")
    levels = level_scales.shape[-1] if level_scales.ndim == 4 else 0
    if level_scales.shape[:3] != (b, t, h) or not 2 <= levels <= MOST_LEVELS:
        raise ConfigError(
            f"log_linear: level_scales must be (b t h levels) = {(b, t, h)} and 2 to {MOST_LEVELS} levels; "
            f"got {tuple(level_scales.shape)}"
        )
    if initial_state is not None:
        found, want = tuple(tuple(x.shape) for x in initial_state), ((b, levels - 1, h, n, p), (b,))
        if found != want:
            raise ConfigError(f"log_linear: initial_state must be S (b m h n p) and count (b) = {want}; got {found}")
    check_segments("log_linear", segments, b, t)
    check_count("log_linear", "chunk_size", chunk_size)


def start_levels(
    initial_state: LogLinearState | None, k: Tensor, v: Tensor, level_scales: Tensor, dtype: torch.dtype,
    segments: Segments | None,
) -> LogLinearState:
    """The incoming state in ``dtype``: zeros where there is none, and in rows that begin another document."""
    S, count = (None, None) if initial_state is None else initial_state
    b, *rest = memory_shape(k, v)
    levels = start_state(S, (b, level_scales.shape[-1] - 1, *rest), v, dtype, segments)
    return levels, start_state(count, (b,), v, torch.int64, segments)


def counts(start: Tensor, t: int, segments: Segments | None) -> Tensor:
    """(b t) int64: tokens of the column's document up to that column, itself included; ``start`` (b) came before the call.

    A pad belongs to the document of the real token before it, or to the state's.
    """
    if segments is None:
        return start[:, None] + torch.arange(1, t + 1, device=start.device)
    real = segments.real.to(torch.int64).cumsum(1)
    before = torch.where(segments.starts, real - 1, 0).cummax(1).values if t else real
    carried = torch.where(segments.effective == segments.carried[:, None], start[:, None], 0)
    return real - before + carried
