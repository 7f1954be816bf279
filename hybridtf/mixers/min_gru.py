"""minGRU and minLSTM: the gated recurrences without their dependence on the state (https://arxiv.org/abs/2410.01201).

    min_gru:   z = sigmoid(z_proj(x));  h_t = (1 - z_t) h_{t-1} + z_t g(h_proj(x_t))
    min_lstm:  f, i = sigmoid(f_proj(x)), sigmoid(i_proj(x));  f', i' = f / (f + i), i / (f + i)
               h_t = f'_t h_{t-1} + i'_t g(h_proj(x_t))
    y = out_proj(h);  g(v) = v + 1/2 where v >= 0, else sigmoid(v)

Both are one recurrence of a single number w: h_t = sigmoid(-w) h_{t-1} + sigmoid(w) g(.), w being the logit of z, or
log(i / f). The g keeps states positive, which the paper's computation in log space needs; it runs here as the plain recurrence,
so that ``positive = false`` (the paper's first form, without g) is the same computation. A document starts from h = 0.

Axes: b batch, t time, d d_model, c channels of the recurrence.

Both are held to the layers of minGRU-pytorch, and to the paper's two forms, in log space and token by token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State
from hybridtf.core.init import fan_in
from hybridtf.nn import Scan, accumulation_dtype


class _MinimalConfig(SequenceMixerConfig):
    """Options that both share."""

    source: ClassVar[str] = "https://arxiv.org/abs/2410.01201"

    expand: float = Field(default=1.0, gt=0)
    """Channels of the recurrence for each of d_model."""
    bias: bool = True
    """Of the gates' and the candidate's projections."""
    positive: bool = True
    """The candidate goes through g."""
    kernel: str = "auto"


class MinGRUConfig(_MinimalConfig):
    """minGRU: a GRU whose gate and candidate do not see the state, so that time is a scan."""

    type: Literal["min_gru"] = "min_gru"

    @classmethod
    def tiny(cls) -> Self:
        return cls(expand=1.5)

    def build(self, ctx: BuildContext) -> MinGRU:
        return MinGRU(self, ctx)


class MinLSTMConfig(_MinimalConfig):
    """minLSTM: an LSTM whose gates do not see the state; in the form whose two gates sum to 1, which does not depend on the
    length."""

    type: Literal["min_lstm"] = "min_lstm"

    @classmethod
    def tiny(cls) -> Self:
        return cls(expand=1.5)

    def build(self, ctx: BuildContext) -> MinLSTM:
        return MinLSTM(self, ctx)


class MinimalRecurrent(RecurrentMixer):
    """What both are but for the gates. Its state: h (b c), float32 at least."""

    def __init__(self, config: _MinimalConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.width = config, round(config.expand * ctx.d_model)
        if self.width < 1:
            raise ctx.error(f"expand * d_model = {config.expand * ctx.d_model} leaves no channels")
        self.h_proj = self.projection(ctx)
        self.scan = Scan(ctx, (self.width,), config.kernel)
        self.out_proj = nn.Linear(self.width, ctx.d_model, bias=False, **ctx.factory)

    def projection(self, ctx: BuildContext) -> nn.Linear:
        """From d_model to the channels."""
        return nn.Linear(ctx.d_model, self.width, bias=self.config.bias, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.scan.init_state(batch_size)

    @abstractmethod
    def logit(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """w (b t c): how much is written, as a logit, in ``dtype``."""

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        wide = accumulation_dtype(x.dtype)
        logit, candidate = self.logit(x, wide), self.h_proj(x).to(wide)
        if self.config.positive:
            candidate = positive(candidate)
        h, state = self.scan(torch.sigmoid(logit) * candidate, segments, state, log_a=-F.softplus(logit))
        return self.out_proj(h.to(x.dtype)), state


def positive(v: Tensor) -> Tensor:
    """g of the paper: continuous, and above 0 everywhere."""
    return torch.where(v >= 0, v + 0.5, torch.sigmoid(v))


class MinGRU(MinimalRecurrent):
    """See :class:`MinGRUConfig`."""

    def __init__(self, config: MinGRUConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.z_proj = self.projection(ctx)

    def logit(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        z: Tensor = self.z_proj(x)
        return z.to(dtype)


class MinLSTM(MinimalRecurrent):
    """See :class:`MinLSTMConfig`."""

    def __init__(self, config: MinLSTMConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.f_proj, self.i_proj = self.projection(ctx), self.projection(ctx)

    def logit(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        f, i = self.f_proj(x).to(dtype), self.i_proj(x).to(dtype)
        return F.softplus(-f) - F.softplus(-i)  # log i - log f
