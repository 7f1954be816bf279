"""``linear_scan`` with its state as a part: h_t = a_t h_{t-1} + u_t, real or complex.

Axes: b batch, t time; channels are any axes after these.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from torch import Tensor, nn

from hybridtf.core import BuildContext, Fixed, Segments
from hybridtf.nn.norms import accumulation_dtype

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Real and imaginary parts."""


class Scan(nn.Module):
    """The recurrence over real channels of ``shape``. Its state: h (b ...shape), float32 at least."""

    def __init__(self, ctx: BuildContext, shape: tuple[int, ...], kernel: str = "auto") -> None:
        super().__init__()
        self.shape = shape
        self.scan = ctx.bind_kernel("linear_scan", kernel, sizes={"channels": math.prod(shape)})

    def init_state(self, batch_size: int) -> Fixed:
        """Zero."""
        dtype = accumulation_dtype(self.scan.dtype)
        return Fixed.empty(batch_size, {"h": self.shape}, dtype=dtype, device=self.scan.device)

    def forward(
        self, u: Tensor, segments: Segments | None, state: Fixed | None, *, log_a: Tensor | None = None, a: Tensor | None = None
    ) -> tuple[Tensor, Fixed | None]:
        """u (b t ...shape) and the factor, itself or its logarithm, to h (b t ...shape) and the state after it."""
        start = None if state is None else state["h"]
        h, last = self.scan(u, log_a, a=a, initial_state=start, segments=segments, n_tokens=u.shape[1])
        return h, None if state is None else state.advance({"h": last}, segments, u.shape[1])


class ComplexScan(nn.Module):
    """The recurrence over complex channels of ``shape``. Its state: re and im (b ...shape), float32 at least."""

    def __init__(self, ctx: BuildContext, shape: tuple[int, ...], kernel: str = "auto") -> None:
        super().__init__()
        self.shape = shape
        self.scan = ctx.bind_kernel("linear_scan", kernel, sizes={"channels": math.prod(shape)}, features={"complex"})

    def init_state(self, batch_size: int) -> Fixed:
        """Zero."""
        dtype = accumulation_dtype(self.scan.dtype)
        return Fixed.empty(batch_size, {"re": self.shape, "im": self.shape}, dtype=dtype, device=self.scan.device)

    def forward(
        self, u: Pair, segments: Segments | None, state: Fixed | None, *, log_a: Pair
    ) -> tuple[Pair, Fixed | None]:
        """u (b t ...shape) and log_a, which is log |a| and the phase, to h (b t ...shape) and the state after it."""
        start = None if state is None else (state["re"], state["im"])
        h, (re, im) = self.scan(u, log_a, initial_state=start, segments=segments, n_tokens=u[0].shape[1])
        return h, None if state is None else state.advance({"re": re, "im": im}, segments, u[0].shape[1])
