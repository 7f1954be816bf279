"""What both forms of ``slstm`` share: the checks, and the state that a call starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments
from hybridtf.ops.documents import start_states, state_dtype

STATES = ("h", "c", "n", "m")
"""Output, memory, normaliser and maximum, each (b heads p)."""


def start(
    x: Tensor, weight_hh: Tensor, initial_state: Mapping[str, Tensor] | None, segments: Segments | None, chunk_size: int
) -> tuple[Tensor, ...]:
    """The incoming state in the order of :data:`STATES`, zeros where there is none and in rows that begin another document.

    Raises :class:`ConfigError` where x (b t heads 4p), weight_hh (heads p 4p) and the rest do not fit.
    """
    square = x.ndim == 4 and weight_hh.ndim == 3 and weight_hh.shape[2] == 4 * weight_hh.shape[1]
    if not square or x.shape[2:] != weight_hh.shape[::2]:
        got = f"{tuple(x.shape)} and {tuple(weight_hh.shape)}"
        raise ConfigError(f"slstm: x must be (b t heads 4p) and weight_hh (heads p 4p); got {got}")
    shape = (x.shape[0], *weight_hh.shape[:2])
    check_segments("slstm", segments, *x.shape[:2])
    check_count("slstm", "chunk_size", chunk_size)
    dtype = state_dtype(x, weight_hh)
    shapes = dict.fromkeys(STATES, shape)
    return tuple(start_states("slstm", shapes, initial_state, x, dtype, segments, axes="(b heads p)").values())


def masked(x: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
    """``x`` (b t heads 4p) in ``dtype``, zero at pads."""
    return (x if segments is None else x.masked_fill(~segments.real[..., None, None], 0)).to(dtype)
