"""The Real-Gated Linear Recurrent Unit (https://arxiv.org/abs/2402.19427, section 2.4) as a part.

    r, i = sigmoid(W_a x + b_a), sigmoid(W_x x + b_x);  log a = -c r softplus(Lambda);  h_t = a h_{t-1} + sqrt(1 - a^2) i x

The gates' matrices are block-diagonal, one block a head. A document's first token is written unscaled: there is no past for
sqrt(1 - a^2) to make room for.

Axes: b batch, t time, c channels, h heads, w channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Fixed, ParamSpec, Segments, init
from hybridtf.nn.norms import accumulation_dtype


class HeadLinear(nn.Module):
    """A linear map of each head's channels by themselves: a block-diagonal matrix, ``weight`` (h w_in w_out).

    ``d_out``: channels of all heads that come out, where these are not ``ctx.d_model``.
    """

    def __init__(self, ctx: BuildContext, n_heads: int, *, bias: bool = True, d_out: int | None = None) -> None:
        super().__init__()
        width, out = ctx.d_model // n_heads, (d_out or ctx.d_model) // n_heads
        self.weight = nn.Parameter(torch.empty(n_heads, width, out, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(n_heads, out, **ctx.factory)) if bias else None

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec("matrix", init.normal(self.weight.shape[1] ** -0.5))}
        return specs if self.bias is None else {**specs, "bias": ParamSpec("bias", init.constant(0.0))}

    def forward(self, x: Tensor) -> Tensor:
        """(b t c) to (b t c_out)."""
        b, t, _ = x.shape
        n, width, left = self.weight.shape
        heads = x.reshape(b * t, n, width).transpose(0, 1)  # [h, b*t, w]
        bias = self.bias
        out = torch.bmm(heads, self.weight) if bias is None else torch.baddbmm(bias[:, None], heads, self.weight)
        return out.transpose(0, 1).reshape(b, t, n * left)


class RGLRU(nn.Module):
    """The layer over ``ctx.d_model`` channels, with no projection of its own; the width must be a multiple of ``n_heads``.

    ``a_range``: exp(-softplus(Lambda)) starts in this range, its square evenly spread, as in the published code (the paper
    says that range of its c-th power); at gate r the decay is the (c r)-th power of it. ``decay_power`` is c.
    """

    def __init__(
        self, ctx: BuildContext, n_heads: int, *, a_range: tuple[float, float] = (0.9, 0.999), decay_power: float = 8.0,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if ctx.d_model % n_heads:
            raise ctx.error(f"a recurrence of {ctx.d_model} channels is not divisible by n_heads = {n_heads}")
        self.a_range, self.decay_power = a_range, decay_power
        self.recurrence_gate = HeadLinear(ctx, n_heads)
        self.input_gate = HeadLinear(ctx, n_heads)
        self.Lambda = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.scan = ctx.bind_kernel("linear_scan", kernel, sizes={"channels": ctx.d_model})

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"Lambda": ParamSpec("state", decay_init(*self.a_range))}

    def init_state(self, batch_size: int) -> Fixed:
        """The recurrence's state (b c), zero, in float32 at least."""
        dtype = accumulation_dtype(self.scan.dtype)
        return Fixed.empty(batch_size, {"h": self.Lambda.shape}, dtype=dtype, device=self.scan.device)

    def forward(
        self, x: Tensor, segments: Segments | None, state: Fixed | None, keep: int = 0
    ) -> tuple[Tensor, Fixed | None]:
        """x (b t c) to h (b t c) in x's dtype, and the state after it (None without one), which remembers ``keep`` tokens."""
        wide = accumulation_dtype(x.dtype)
        r, i = (torch.sigmoid(gate(x).to(wide)) for gate in (self.recurrence_gate, self.input_gate))
        log_a = r * (-self.decay_power * F.softplus(self.Lambda.to(wide)))
        first = first_tokens(x, segments, None if state is None else state.length)
        u = x.to(wide) * i * input_scale(log_a).masked_fill(first[..., None], 1.0)
        start = None if state is None else state["h"]
        h, last = self.scan(u, log_a, initial_state=start, segments=segments, n_tokens=x.shape[1])
        if state is None or start is None:
            return h.to(x.dtype), None
        past, past_length = snapshots(h, start, segments, state.length, keep) if keep else (None, None)
        kept = None if past is None else {"h": past}
        new = state.advance({"h": last}, segments, x.shape[1], past=kept, past_length=past_length)
        return h.to(x.dtype), new


def input_scale(log_a: Tensor) -> Tensor:
    """sqrt(1 - a^2), and its derivative, to full precision for a near 1 and near 0.

    The derivative by log a grows as 1 / sqrt(-2 log a), yet what reaches the parameters is that times log a and stays
    bounded; where log a underflows to 0 the derivative is its limit there, 0. No clipping is needed.
    """
    scale: Tensor = _InputScale.apply(log_a)  # type: ignore[no-untyped-call]
    return scale


class _InputScale(torch.autograd.Function):
    """Not left to autograd, whose derivative of expm1 is its result plus 1: nothing is left of a small a^2."""

    @staticmethod
    def forward(log_a: Tensor) -> Tensor:
        return torch.expm1(2 * log_a).neg_().sqrt_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        log_a, scale = ctx.saved_tensors
        slope: Tensor = ((2 * log_a).exp() / scale).masked_fill(scale == 0, 0)
        return -grad * slope


def first_tokens(x: Tensor, segments: Segments | None, length: Tensor | None) -> Tensor:
    """(b t) bool: first tokens of documents, given the ``length`` (b) of the state's document (None: no state)."""
    if segments is not None:
        return segments.real & (segments.positions(length) == 0)
    column = torch.arange(x.shape[1], device=x.device)
    if length is None:
        return (column == 0).expand(x.shape[0], -1)
    return (column == 0) & (length == 0)[:, None]


def snapshots(
    h: Tensor, start: Tensor, segments: Segments | None, length: Tensor, keep: int
) -> tuple[Tensor, Tensor]:
    """States (b keep c) from before each of a row's last ``keep`` real tokens, and the length (b keep) then.

    ``h`` (b t c) are all states, ``start`` (b c) and ``length`` (b) the incoming ones. A length of -1 marks what lies before
    the row's last document.
    """
    t = h.shape[1]
    before = torch.cat([start[:, None], h], 1)  # column i: before token i
    steps = torch.arange(max(t - keep, 0), t, device=h.device)
    if segments is None:
        return before[:, steps], length[:, None] + steps
    order = torch.argsort(segments.real.to(torch.int8), dim=1, stable=True)[:, steps]  # pads first
    chosen = before.gather(1, order[..., None].expand(-1, -1, h.shape[2]))
    positions = segments.positions(length).gather(1, order)
    chosen = chosen.masked_fill(segments.starts.gather(1, order)[..., None], 0)
    # A pad stands before every real token of its row: there the state is still the incoming one.
    pad = ~segments.real.gather(1, order)
    chosen = torch.where(pad[..., None], start[:, None], chosen)
    ours = torch.where(pad, segments.keeps_state[:, None], segments.in_last.gather(1, order))
    lengths = torch.where(pad, length[:, None], positions)
    return chosen, torch.where(ours, lengths, -1)


def decay_init(low: float, high: float) -> init.Init:
    """Lambda with exp(-softplus(Lambda)) = a, a^2 drawn evenly from [low^2, high^2]."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        rate = tensor.uniform_(low**2, high**2, generator=generator).log_().mul_(-0.5)
        rate.add_(torch.log(-torch.expm1(-rate)))

    return fill
