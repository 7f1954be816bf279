"""What ops of recurrences share: the precision of states, and what documents do to inputs and incoming states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments


def state_dtype(*inputs: Tensor | None) -> torch.dtype:
    """The precision of states, gates and decays: float32, or float64 where an input is float64."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in inputs) else torch.float32


def mask_pads(x: Tensor, segments: Segments | None) -> Tensor:
    """``x`` (b t ...) with zeros at pads, whatever they held (NaN included); its gradient is zero there too."""
    if segments is None:
        return x
    return x.masked_fill(~segments.real.view(*x.shape[:2], *[1] * (x.ndim - 2)), 0)


def carried_state(initial_state: Tensor, dtype: torch.dtype, segments: Segments | None) -> Tensor:
    """The incoming state (b ...) in ``dtype``, with zeros in rows that begin another document."""
    if segments is None:
        return initial_state.to(dtype)
    forgotten = ~segments.continues & (segments.last_id > 0)
    return initial_state.to(dtype).masked_fill(forgotten.view(-1, *[1] * (initial_state.ndim - 1)), 0)


def memory_shape(k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """(b h k p), the state of an op that writes keys k (b t ... k) beside values v (b t ... h p)."""
    return v.shape[0], v.shape[-2], k.shape[-1], v.shape[-1]


def start_state(
    initial_state: Tensor | None, shape: Sequence[int], like: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state of ``shape`` (b ...) in ``dtype``: zeros, on the device of ``like``, where there is none, and in rows
    that begin another document."""
    return like.new_zeros(shape, dtype=dtype) if initial_state is None else carried_state(initial_state, dtype, segments)


def start_states(
    op: str, shapes: Mapping[str, tuple[int, ...]], initial_state: Mapping[str, Tensor] | None, like: Tensor,
    dtype: torch.dtype, segments: Segments | None, axes: str = "",
) -> dict[str, Tensor]:
    """The same of an op whose state is several tensors, by name and shape; raises :class:`ConfigError` where one differs.

    ``axes``: what the error calls the axes, where all tensors have the same.
    """
    states = {}
    for name, shape in shapes.items():
        given = None if initial_state is None else initial_state.get(name)
        if initial_state is not None and (given is None or given.shape != shape):
            got = None if given is None else tuple(given.shape)
            raise ConfigError(f"{op}: initial_state[{name!r}] must be {axes}{' = ' if axes else ''}{shape}; got {got}")
        states[name] = start_state(given, shape, like, dtype, segments)
    return states


def log_steps(log_a: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
    """``log_a`` (b t ...) for sums: no decay at pads, and no -inf: exp(-1000) is 0 in float64 too."""
    return mask_pads(log_a, segments).to(dtype).clamp(min=-1000.0)


def running_sum(x: Tensor, start: Tensor, segments: Segments | None) -> Tensor:
    """The sum (b t ...) of ``x`` over each token's document up to it, on top of ``start`` (b ...) where that is carried on.

    ``x`` is 0 at pads. Documents are told apart by what had been summed before each: ask for float64 where that matters.
    """
    total = x.cumsum(1)
    if segments is None or not x.shape[1]:
        return total + start[:, None]
    steps = torch.arange(x.shape[1], device=x.device)
    first = torch.where(segments.starts, steps, -1).cummax(1).values  # -1: the carried document
    at = (first + 1).view(*first.shape, *[1] * (x.ndim - 2)).expand_as(x)
    return total - torch.cat([-start[:, None], total - x], 1).gather(1, at)
