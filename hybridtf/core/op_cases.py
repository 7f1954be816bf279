"""How to try an op: what the contract kit draws to hold every kernel of an op against its reference.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OpInputs(NamedTuple):
    """Arguments of an op by name, in float64 on the CPU. Tensors of floating point are differentiated."""

    timed: Mapping[str, Any]
    """Tensors (b t ...), or pairs of such (a complex number)."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """Tensors without a time axis (weights), or pairs of such."""
    state: Any = None
    """The incoming state, given as ``initial_state``: a tensor (b ...), a tuple or a dict of such; None: the op has none."""


@dataclass(frozen=True)
class OpCase:
    """One way to call an op. The op takes ``segments=`` and, with a state, ``initial_state=``; it returns (y, state) then, and
    y alone otherwise; y is a tensor (b t ...), or a pair of such."""

    op: str
    name: str
    """Says which options of the op it tries."""
    draw: Callable[[torch.Generator, int, int], OpInputs]
    """``draw(generator, b, t)``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are no tensors, given by name."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    """``sizes`` and ``features`` of the :class:`KernelRequest` for such a call: a kernel that refuses it is not held to it."""
    chunk: int = 4
    """Tokens after which a kernel of this call begins another chunk: lengths around it are tried."""
    causal: bool = True
    """No result depends on a later token."""
    zero_at_pads: bool = True
    """y is zero at pads; else it may be anything there (a scan gives the state that passes the pad)."""
    run: Callable[..., Any] | None = None
    """``run(op, inputs, segments, options)`` makes the call, where the op takes its documents in a form of its own (a mask)."""


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64, for :attr:`OpCase.draw`."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
