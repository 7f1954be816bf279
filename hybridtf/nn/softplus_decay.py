"""The decay of Mamba-2 and the gated delta rules: ln a_t = -exp(A_log) softplus(x_t + dt_bias), and where it starts."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hybridtf.core import ParamSpec, SequenceMixerConfig, init
from hybridtf.nn.limits import PositiveRange
from hybridtf.nn.norms import accumulation_dtype


class SoftplusDecayConfig(SequenceMixerConfig):
    """Where the decays start."""

    a_range: PositiveRange = (1.0, 16.0)
    """The decay rates exp(A_log) start evenly in this range."""
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps softplus(dt_bias) start log-evenly in this range."""
    dt_floor: float = Field(default=1e-4, gt=0)
    """No time step starts below it."""

    def decay_specs(self) -> dict[str, ParamSpec]:
        """Of the parameters ``A_log`` and ``dt_bias``."""
        return {
            "A_log": ParamSpec("state", init.log_uniform(*self.a_range)),
            "dt_bias": ParamSpec("state", init.softplus_inverse_log_uniform(*self.dt_range, self.dt_floor)),
        }


def time_step(x: Tensor, dt_bias: Tensor) -> Tensor:
    """softplus(x + dt_bias) (b t ...), in float32 at least."""
    wide = accumulation_dtype(x.dtype)
    return F.softplus(x.to(wide) + dt_bias.to(wide))


def softplus_log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias) (b t ...), in float32 at least."""
    return -A_log.to(accumulation_dtype(x.dtype)).exp() * time_step(x, dt_bias)
