"""An op with two kernels, and a mixer with a ``Fixed`` state on it.

Axes: b batch, t time, c channels.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Fixed,
    Kernel,
    ParamSpec,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    always,
    init,
    with_history,
)
from hybridtf.testing.doubles.documents import documents, no_length


def ema_reference(x: Tensor, decay: Tensor, initial: Tensor, real: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = decay h_{t-1} + (1 - decay) x_t for each document alone; pads change nothing.

    ``x`` (b t c), ``decay`` (c), ``initial`` (b c), ``real`` and ``document`` (b t) to y (b t c) and the last h (b c).
    """
    h, at, out = initial, torch.zeros_like(document[:, :1]), []
    for t in range(x.shape[1]):
        here = real[:, t, None]
        fresh = here & (document[:, t, None] != at)
        h = torch.where(here, decay * torch.where(fresh, torch.zeros_like(h), h) + (1 - decay) * x[:, t], h)
        at = torch.where(here, document[:, t, None], at)
        out.append(torch.where(here, h, torch.zeros_like(h)))
    return (torch.stack(out, 1) if out else x), h


def ema_matrix(x: Tensor, decay: Tensor, initial: Tensor, real: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one (t t) product: weight decay^(tokens between) inside a document."""
    if x.shape[1] == 0:
        return x, initial
    count = real.to(torch.int64).cumsum(1)
    age = count[:, :, None] - count[:, None, :]
    seen = real[:, None, :] & (document[:, :, None] == document[:, None, :]) & (age >= 0)
    seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    weight = decay ** age.clamp(min=0)[..., None].to(x.dtype)  # [b, t, t, c]
    weight = torch.where(seen[..., None], weight, torch.zeros_like(weight)) * (1 - decay)
    value = torch.where(real[..., None], x, torch.zeros_like(x))
    h = torch.einsum("btsc,bsc->btc", weight, value)
    carried = decay ** count[..., None].to(x.dtype) * initial[:, None]
    h = h + torch.where((document == 0)[..., None], carried, torch.zeros_like(carried))
    return torch.where(real[..., None], h, torch.zeros_like(h)), h[:, -1]


def load_reference() -> Any:
    return ema_reference


def load_matrix() -> Any:
    return ema_matrix


KERNELS: tuple[Kernel, ...] = (
    Kernel("double_ema", "reference", 0, always, load_reference),
    Kernel("double_ema", "matrix", 10, always, load_matrix),
)



class EmaConfig(SequenceMixerConfig):
    """An exponential moving average with a learned decay a channel."""

    type: Literal["double_ema"] = "double_ema"
    expand: int = Field(default=1, ge=1)
    kernel: str = "auto"
    cell: tuple[float, ...] = (0.5, 2.0)
    """Bounds of the logit of the decay."""

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> EmaMixer:
        return EmaMixer(self, ctx)


class EmaMixer(SequenceMixer):
    """See :class:`EmaConfig`."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.bounds = config.cell
        width = config.expand * ctx.d_model
        self.in_proj = nn.Linear(ctx.d_model, width, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(width, ctx.d_model, bias=False, **ctx.factory)
        self.logit = nn.Parameter(torch.empty(width, **ctx.factory))
        self.ema = ctx.bind_kernel("double_ema", config.kernel, sizes={"channels": width})

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"logit": ParamSpec("state", init.uniform(min(self.bounds), max(self.bounds)))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        wide = torch.promote_types(self.logit.dtype, torch.float32)
        h = torch.zeros(batch_size, self.logit.shape[0], dtype=wide, device=self.logit.device)
        return Fixed({"h": h}, no_length(batch_size, h))

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        if state is None:
            return self._step(x, segments, self.init_state(x.shape[0]))[0], None
        return with_history(self._step, x, segments, state, keep, self.init_state)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        real, document = documents(x, segments)
        wide = state["h"].dtype
        y, h = self.ema(
            self.in_proj(x).to(wide), self.logit.to(wide).sigmoid(), state["h"], real, document, n_tokens=x.shape[1]
        )
        return self.out_proj(y.to(x.dtype)), state.advance({"h": h}, segments, x.shape[1])
