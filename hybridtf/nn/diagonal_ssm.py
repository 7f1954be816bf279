"""Diagonal state-space models: discretisation, starts, and S4D's layer as a part (https://arxiv.org/abs/2206.11893).

    h' = A h + B u,  y = Re(C h),  sampled every dt:
    zoh:       A_bar = exp(dt A);                          B_bar = (A_bar - 1) / A B
    bilinear:  A_bar = (1 + dt A / 2) / (1 - dt A / 2);    B_bar = dt / (1 - dt A / 2) B

Complex numbers are (re, im) pairs. Axes: b batch, t time, c channels, n conjugate pairs of states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Fixed, ParamSpec, Segments, init
from hybridtf.nn.hippo import diagonal_hippo
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.scan import Pair

Discretisation: TypeAlias = Literal["zoh", "bilinear"]
DiagonalInit: TypeAlias = Literal["lin", "inv", "legs"]
"""S4D-Lin, S4D-Inv and S4D-LegS of the paper."""


def multiply(x: Pair, y: Pair) -> Pair:
    """x y."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def divide(x: Pair, y: Pair) -> Pair:
    """x / y."""
    size = y[0].square() + y[1].square()
    re, im = multiply(x, (y[0], -y[1]))
    return re / size, im / size


def discretised(a: Pair, dt: Tensor, kind: Discretisation) -> tuple[Pair, Pair]:
    """log A_bar (log |A_bar| and the phase), and what B is multiplied with; ``a`` with a real part that is not positive."""
    x, y = a[0] * dt, a[1] * dt
    if kind == "zoh":
        # exp(x + iy) - 1 without the cancellation near 0.
        grown = torch.expm1(x) * y.cos() - 2 * (y / 2).sin().square(), x.exp() * y.sin()
        return (x, y), divide(grown, a)
    x, y = x / 2, y / 2
    below = (1 - x).square() + y.square()  # |1 - dt A / 2|^2
    least = torch.finfo(x.dtype).eps - 1  # dt A = -2 has no logarithm
    log_size = torch.log1p((4 * x / below).clamp(min=least)) / 2
    phase = torch.atan2(y, 1 + x) + torch.atan2(y, 1 - x)
    return (log_size, phase), divide((dt.expand_as(x), torch.zeros_like(x)), (1 - x, -y))


def diagonal_start(kind: DiagonalInit, n: int) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts of A for ``n`` conjugate pairs."""
    steps = torch.arange(n, dtype=torch.float64)
    if kind == "lin":
        imag = math.pi * steps
    elif kind == "inv":
        imag = 2 * n / math.pi * (2 * n / (2 * steps + 1) - 1)
    else:
        imag = diagonal_hippo(2 * n).eigenvalues.imag
    return torch.full_like(imag, -0.5), imag


def filled_with(values: Callable[[], Tensor]) -> init.Init:
    """Fills with what ``values()`` gives, repeated over leading axes."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.copy_(values().to(tensor.dtype).expand_as(tensor))

    return fill


class DiagonalSSM(nn.Module):
    """S4D over ``ctx.d_model`` channels with ``d_state`` states each, in conjugate pairs; B is 1, as C has its freedom.

    Its state: re and im (b c n), float32 at least.
    """

    def __init__(
        self, ctx: BuildContext, d_state: int, *, a_init: DiagonalInit, discretisation: Discretisation,
        dt_range: tuple[float, float], chunk_size: int, kernel: str = "auto",
    ) -> None:
        super().__init__()
        if d_state % 2:
            raise ctx.error(f"d_state = {d_state} must be even: states come in conjugate pairs")
        self.a_init, self.discretisation, self.dt_range, self.chunk_size = a_init, discretisation, dt_range, chunk_size
        self.shape = (ctx.d_model, d_state // 2)
        self.log_dt = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.log_A_real = nn.Parameter(torch.empty(self.shape, **ctx.factory))
        self.A_imag = nn.Parameter(torch.empty(self.shape, **ctx.factory))
        self.C = nn.Parameter(torch.empty(*self.shape, 2, **ctx.factory))
        sizes = {"channels": ctx.d_model, "d_state": d_state // 2}
        self.state_space = ctx.bind_kernel("state_space", kernel, sizes=sizes, features={"complex"})

    def param_specs(self) -> dict[str, ParamSpec]:
        low, high = map(math.log, self.dt_range)
        n = self.shape[1]
        return {
            "log_dt": ParamSpec("state", init.uniform(low, high)),
            "log_A_real": ParamSpec("state", filled_with(lambda: diagonal_start(self.a_init, n)[0].neg().log()), drawn=False),
            "A_imag": ParamSpec("state", filled_with(lambda: diagonal_start(self.a_init, n)[1]), drawn=False),
            "C": ParamSpec("state", init.normal(0.5**0.5)),
        }

    def init_state(self, batch_size: int) -> Fixed:
        """Zero."""
        dtype, device = accumulation_dtype(self.state_space.dtype), self.state_space.device
        return Fixed.empty(batch_size, {"re": self.shape, "im": self.shape}, dtype=dtype, device=device)

    def forward(self, u: Tensor, segments: Segments | None, state: Fixed | None) -> tuple[Tensor, Fixed | None]:
        """u (b t c) to y (b t c), float32 at least, and the state after it (None without one)."""
        y, (re, im) = self.run(u, segments, None if state is None else (state["re"], state["im"]))
        return y, None if state is None else state.advance({"re": re, "im": im}, segments, u.shape[1])

    def run(self, u: Tensor, segments: Segments | None, before: Pair | None) -> tuple[Tensor, Pair]:
        """The same with the state's tensors (b c n) alone."""
        wide = accumulation_dtype(u.dtype)
        a = -self.log_A_real.to(wide).exp(), self.A_imag.to(wide)
        log_a, b = discretised(a, self.log_dt.to(wide).exp()[:, None], self.discretisation)
        c = self.C.to(wide)
        out: tuple[Tensor, Pair] = self.state_space(
            u.to(wide), b=b, c=(2 * c[..., 0], 2 * c[..., 1]), log_a=log_a, initial_state=before, segments=segments,
            chunk_size=self.chunk_size, n_tokens=u.shape[1],
        )
        return out
