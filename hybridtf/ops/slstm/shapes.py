"""What both forms of ``slstm`` share: the checks, and the state that a call starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state, state_dtype

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
    if segments is not None and segments.ids.shape != x.shape[:2]:
        raise ConfigError(f"slstm: segments must be (b t) = {tuple(x.shape[:2])}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"slstm: chunk_size must be 1 or more; got {chunk_size}")
    dtype = state_dtype(x, weight_hh)
    if initial_state is None:
        return tuple(x.new_zeros(shape, dtype=dtype) for _ in STATES)
    for name in STATES:
        given = initial_state.get(name)
        if given is None or given.shape != shape:
            got = "None" if given is None else str(tuple(given.shape))
            raise ConfigError(f"slstm: initial_state[{name!r}] must be (b heads p) = {shape}; got {got}")
    return tuple(carried_state(initial_state[name], dtype, segments) for name in STATES)


def masked(x: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
    """``x`` (b t heads 4p) in ``dtype``, zero at pads."""
    return (x if segments is None else x.masked_fill(~segments.real[..., None, None], 0)).to(dtype)
