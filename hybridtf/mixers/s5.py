"""S5: one diagonal state-space model with many inputs and outputs (https://arxiv.org/abs/2208.04933).

    h_t = A_bar h_{t-1} + B_bar x_t,   y_t = 2 Re(C h_t) + D x_t

The state is shared by all channels: p / 2 conjugate pairs of p states. A starts as the eigenvalues of HiPPO-N, the normal
part of HiPPO-LegS, in ``n_blocks`` equal blocks; B and C start in its eigenvectors. Each pair has its own time step. The
nonlinearity around it belongs to the block.

Axes: b batch, t time, d d_model, p d_state.

Held to the layer of s5-pytorch, and to the paper's system, simulated with whole matrices.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.nn import (
    ComplexScan,
    Discretisation,
    PositiveRange,
    accumulation_dtype,
    diagonal_hippo,
    discretised,
    filled_with,
    multiply,
)


class S5Config(SequenceMixerConfig):
    """S5: one diagonal state-space model with many inputs and outputs. The defaults are the published code's."""

    source: ClassVar[str] = "https://arxiv.org/abs/2208.04933"

    type: Literal["s5"] = "s5"
    d_state: int = Field(default=256, gt=0)
    """States, a multiple of 2 ``n_blocks`` (P in the paper)."""
    n_blocks: int = Field(default=8, gt=0)
    """Blocks that A starts from (J in the paper)."""
    discretisation: Discretisation = "zoh"
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    clip_eigenvalues: bool = False
    """Keeps the real part of A below -1e-4, so that no state can grow; the paper's code advises it for generation."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.d_state % (2 * self.n_blocks):
            raise ValueError(f"d_state = {self.d_state} is no multiple of 2 n_blocks = {2 * self.n_blocks}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=8, n_blocks=2, dt_range=(0.01, 0.1))

    def build(self, ctx: BuildContext) -> S5:
        return S5(self, ctx)


class S5(RecurrentMixer):
    """See :class:`S5Config`. Its state: re and im (b p/2), float32 at least."""

    def __init__(self, config: S5Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config, pairs = config, config.d_state // 2
        self.Lambda_re, self.Lambda_im, self.log_step = (nn.Parameter(torch.empty(pairs, **ctx.factory)) for _ in range(3))
        self.B = nn.Parameter(torch.empty(2, pairs, ctx.d_model, **ctx.factory))
        self.C = nn.Parameter(torch.empty(2, ctx.d_model, pairs, **ctx.factory))
        self.D = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.scan = ComplexScan(ctx, (pairs,), config.kernel)

    def param_specs(self) -> dict[str, ParamSpec]:
        low, high = map(math.log, self.config.dt_range)
        size, blocks = self.config.d_state // self.config.n_blocks, self.config.n_blocks

        def values() -> Tensor:
            return diagonal_hippo(size).eigenvalues.repeat(blocks)

        return {
            "Lambda_re": ParamSpec("state", filled_with(lambda: values().real), drawn=False),
            "Lambda_im": ParamSpec("state", filled_with(lambda: values().imag), drawn=False),
            "log_step": ParamSpec("state", init.uniform(low, high)),
            "B": ParamSpec("matrix", _in_eigenvectors(size, of_inputs=True)),
            "C": ParamSpec("matrix", _in_eigenvectors(size, of_inputs=False), residual=True),
            "D": ParamSpec("state", init.normal(1.0), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.scan.init_state(batch_size)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        wide = accumulation_dtype(x.dtype)
        a_re = self.Lambda_re.to(wide)
        if self.config.clip_eigenvalues:
            a_re = a_re.clamp(max=-1e-4)
        log_a, gain = discretised((a_re, self.Lambda_im.to(wide)), self.log_step.to(wide).exp(), self.config.discretisation)
        inputs, b, c = x.to(wide), self.B.to(wide), 2 * self.C.to(wide)
        u = multiply((F.linear(inputs, b[0]), F.linear(inputs, b[1])), gain)
        h, state = self.scan(u, segments, state, log_a=log_a)
        y = F.linear(h[0], c[0]) - F.linear(h[1], c[1]) + self.D.to(wide) * inputs
        return y.to(x.dtype), state


def _in_eigenvectors(size: int, *, of_inputs: bool) -> init.Init:
    """A real B in the basis of A, V^* B, or a complex C in it, C V; blocks of ``size`` states, of which half are kept.

    Drawn with variance 1 / fan-in, as in the published code.
    """

    def fill(tensor: Tensor, generator: Generator) -> None:
        vectors = diagonal_hippo(size).vectors.to(torch.complex64)  # [size, size / 2]
        if of_inputs:  # [2, pairs, d]
            blocks, d = 2 * tensor.shape[1] // size, tensor.shape[2]
            real = torch.empty(blocks, size, d).normal_(0.0, d**-0.5, generator=generator)
            made = (vectors.mH @ real.to(vectors.dtype)).flatten(0, 1)
        else:  # [2, d, pairs]
            d, states = tensor.shape[1], 2 * tensor.shape[2]
            parts = torch.empty(2, d, states // size, size).normal_(0.0, states**-0.5, generator=generator)
            made = (torch.complex(parts[0], parts[1]) @ vectors).flatten(1)
        tensor.copy_(torch.stack([made.real, made.imag]))

    return fill
