"""S4's state-space model, diagonal plus low rank, as a part (https://arxiv.org/abs/2111.00396).

    h' = A h + B u,  y = 2 Re(C h),  A = diag(Lambda) - p p^*  over conjugate pairs, sampled every dt by the bilinear transform:
    A_bar = (I - dt A / 2)^-1 (I + dt A / 2),  B_bar = (I - dt A / 2)^-1 dt B

A real input keeps the two states of a pair conjugate, so that one of them is enough. On it, p p^* becomes 2 p Re(p^* z): A is
then no complex matrix, but a real one over (Re z, Im z), and so is A_bar, which the op ``state_space`` takes. The inverse is
that of a diagonal with a real rank-one term (Sherman and Morrison): with E = 1 / (1 - dt Lambda / 2),

    (I - dt A / 2)^-1 r = E r - dt E p <p, E r> / (1 + dt <p, E p>),   <p, z> = Re(p^* z)

and nothing is divided by less than 1, since Re E > 0. Re<z, A z> <= 0 makes A_bar a contraction: its powers do not grow.

Axes: b batch, t time, c channels, n conjugate pairs, s = 2 n real numbers of a state, m columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Fixed, ParamSpec, Segments, init
from hybridtf.nn.diagonal_ssm import divide, filled_with, multiply
from hybridtf.nn.hippo import diagonal_hippo
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.scan import Pair


class DPLRSSM(nn.Module):
    """S4's system over ``ctx.d_model`` channels with ``d_state`` states each; starts as HiPPO-LegS.

    Its state: h (b c s), float32 at least.
    """

    def __init__(
        self, ctx: BuildContext, d_state: int, *, dt_range: tuple[float, float], chunk_size: int, kernel: str = "auto"
    ) -> None:
        super().__init__()
        if d_state % 2:
            raise ctx.error(f"d_state = {d_state} must be even: states come in conjugate pairs")
        self.d_state, self.dt_range, self.chunk_size = d_state, dt_range, chunk_size
        shape = (ctx.d_model, d_state // 2)
        self.log_dt = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.log_A_real, self.A_imag = (nn.Parameter(torch.empty(shape, **ctx.factory)) for _ in range(2))
        self.P, self.B, self.C = (nn.Parameter(torch.empty(*shape, 2, **ctx.factory)) for _ in range(3))
        sizes = {"channels": ctx.d_model, "d_state": d_state}
        self.state_space = ctx.bind_kernel("state_space", kernel, sizes=sizes, features={"dense"})

    def param_specs(self) -> dict[str, ParamSpec]:
        low, high = map(math.log, self.dt_range)
        n = self.d_state
        return {
            "log_dt": ParamSpec("state", init.uniform(low, high)),
            "log_A_real": ParamSpec("state", filled_with(lambda: diagonal_hippo(n).eigenvalues.real.neg().log()), drawn=False),
            "A_imag": ParamSpec("state", filled_with(lambda: diagonal_hippo(n).eigenvalues.imag), drawn=False),
            "P": ParamSpec("state", filled_with(lambda: torch.view_as_real(diagonal_hippo(n).low_rank)), drawn=False),
            "B": ParamSpec("state", filled_with(lambda: torch.view_as_real(diagonal_hippo(n).b)), drawn=False),
            "C": ParamSpec("state", init.normal(0.5**0.5)),
        }

    def init_state(self, batch_size: int) -> Fixed:
        """Zero."""
        dtype, shape = accumulation_dtype(self.state_space.dtype), (self.C.shape[0], self.d_state)
        return Fixed.empty(batch_size, {"h": shape}, dtype=dtype, device=self.state_space.device)

    def system(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """A_bar (c s s), B_bar (c s), and C as it reads (Re z, Im z), (c s)."""
        a, p, b, c, dt = self._continuous(dtype)
        basis = torch.eye(self.d_state, dtype=dtype, device=dt.device)[None].chunk(2, dim=1)  # all (Re z, Im z), each [1, n, s]
        a_bar = _solved(a, p, dt, _ahead(a, p, dt, (basis[0], basis[1])))
        b_bar = _solved(a, p, dt, (dt * b[0], dt * b[1]))
        return torch.cat(a_bar, 1), torch.cat(b_bar, 1)[..., 0], torch.cat([2 * c[0], -2 * c[1]], 1)[..., 0]

    def _continuous(self, dtype: torch.dtype) -> tuple[Pair, Pair, Pair, Pair, Tensor]:
        """Lambda, p, B and C (c n 1), and dt (c 1 1)."""
        a = -self.log_A_real.to(dtype).exp()[..., None], self.A_imag.to(dtype)[..., None]
        p, b, c = (_pair(x.to(dtype)) for x in (self.P, self.B, self.C))
        return a, p, b, c, self.log_dt.to(dtype).exp()[:, None, None]

    def step(self, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One token u (b c) after the state h (b c s): y (b c) and the state after it.

        A_bar is not made: the rows of the batch take its place as columns, in s steps a channel where A_bar has s^2 numbers.
        """
        a, p, b, c, dt = self._continuous(h.dtype)
        columns = h.permute(1, 2, 0).chunk(2, dim=1)  # [c, n, b]
        ahead = _ahead(a, p, dt, (columns[0], columns[1]))
        driven = dt * u.t()[:, None]  # [c, 1, b]
        z = _solved(a, p, dt, (ahead[0] + b[0] * driven, ahead[1] + b[1] * driven))
        y = 2 * (c[0] * z[0] - c[1] * z[1]).sum(1)
        return y.t(), torch.cat(z, 1).permute(2, 0, 1).contiguous()

    def forward(self, u: Tensor, segments: Segments | None, state: Fixed | None) -> tuple[Tensor, Fixed | None]:
        """u (b t c) to y (b t c), float32 at least, and the state after it (None without one)."""
        wide = accumulation_dtype(u.dtype)
        if u.shape[1] == 1 and state is not None and segments is None:
            read, h = self.step(u[:, 0].to(wide), state["h"])
            return read[:, None], state.advance({"h": h}, segments, 1)
        a, b, c = self.system(wide)
        y, h = self.state_space(
            u.to(wide), b=b, c=c, a=a, initial_state=None if state is None else state["h"], segments=segments,
            chunk_size=self.chunk_size, n_tokens=u.shape[1],
        )
        return y, None if state is None else state.advance({"h": h}, segments, u.shape[1])


def _pair(x: Tensor) -> Pair:
    """(c n 2) as two of (c n 1)."""
    return x[..., :1], x[..., 1:]


def _inner(p: Pair, z: Pair) -> Tensor:
    """Re(p^* z), (c 1 m)."""
    return (p[0] * z[0] + p[1] * z[1]).sum(1, keepdim=True)


def _ahead(a: Pair, p: Pair, dt: Tensor, z: Pair) -> Pair:
    """(I + dt A / 2) z, for z (c n m)."""
    moved, along = multiply(a, z), _inner(p, z)
    return z[0] + dt / 2 * (moved[0] - 2 * p[0] * along), z[1] + dt / 2 * (moved[1] - 2 * p[1] * along)


def _solved(a: Pair, p: Pair, dt: Tensor, r: Pair) -> Pair:
    """(I - dt A / 2)^-1 r, for r (c n m)."""
    below = 1 - dt * a[0] / 2, -dt * a[1] / 2
    er, ep = divide(r, below), divide(p, below)
    share = dt * _inner(p, er) / (1 + dt * _inner(p, ep))
    return er[0] - ep[0] * share, er[1] - ep[1] * share
