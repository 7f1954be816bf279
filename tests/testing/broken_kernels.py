"""Kernels of the op ``short_conv`` that are each wrong in one way, for the kit to find and name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import Kernel, KernelRequest, Segments, always
from hybridtf.ops.short_conv import short_conv_taps


class _Scaled(torch.autograd.Function):
    """The same number with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 1.01 * grads[0]


def wrong_gradient(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    """Of the bias alone."""
    return short_conv_taps(x, weight, None if bias is None else _Scaled.apply(bias), **options)


def no_gradient_to_the_state(
    x: Tensor, weight: Tensor, *given: Any, initial_state: Tensor | None = None, **options: Any
) -> Any:
    """Detaches what comes in."""
    state = None if initial_state is None else initial_state.detach()
    return short_conv_taps(x, weight, *given, initial_state=state, **options)


def wrong_final_state(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Its outputs are right, and its window comes back in the wrong order."""
    y, state = short_conv_taps(x, weight, *given, **options)
    return y, state.flip(1)


def ignores_segments(x: Tensor, weight: Tensor, *given: Any, segments: Segments | None = None, **options: Any) -> Any:
    return short_conv_taps(x, weight, *given, segments=None, **options)


def wrong_inside_a_chunk(x: Tensor, weight: Tensor, *given: Any, segments: Segments | None = None, **options: Any) -> Any:
    """Lets a document see the one before it, where it begins inside a chunk of four tokens."""
    if segments is not None and x.shape[1] > 4:
        chunk = torch.arange(x.shape[1]) // 4
        before = segments.ids.roll(1, 1)
        inside = segments.starts & (chunk == chunk.roll(1)) & (before > 0)
        if bool(inside.any()):
            y, state = short_conv_taps(x, weight, *given, segments=segments, **options)
            leak = (x * weight[:, -1]).roll(1, 1)
            return y + torch.where(inside[..., None], leak, torch.zeros_like(leak)), state
    return short_conv_taps(x, weight, *given, segments=segments, **options)


def low_precision(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Right in float64 alone."""
    y, state = short_conv_taps(x, weight, *given, **options)
    return (y * 1.005 if x.dtype == torch.float32 else y), state


def rounds(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Far off in bfloat16."""
    y, state = short_conv_taps(x, weight, *given, **options)
    return ((y + 64) - 64 if x.dtype == torch.bfloat16 else y), state


def returns_float32(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Whatever it was given, below float64."""
    y, state = short_conv_taps(x, weight, *given, **options)
    return (y if y.dtype == torch.float64 else y.float()), state


def no_half(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Raises where it should have refused."""
    if x.dtype == torch.float16:
        raise RuntimeError("not implemented for 'Half'")
    return short_conv_taps(x, weight, *given, **options)


def needs_rows(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """Reads the memory of x as if its channels lay side by side."""
    if not x.is_contiguous() and x.stride(-1) > 1:
        x = torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
    return short_conv_taps(x, weight, *given, **options)


def writes_state(x: Tensor, weight: Tensor, *given: Any, initial_state: Tensor | None = None, **options: Any) -> Any:
    """Hands the new window back in the memory of the old one, when no gradients are asked for."""
    y, state = short_conv_taps(x, weight, *given, initial_state=initial_state, **options)
    if initial_state is None or torch.is_grad_enabled():
        return y, state
    return y, initial_state.copy_(state)


def wrong_decode(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    """A step without gradients adds its bias twice."""
    y, state = short_conv_taps(x, weight, *given, **options)
    return (y * 1.01 if x.shape[1] == 1 and not torch.is_grad_enabled() else y), state


def wrong_prefill(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    y, state = short_conv_taps(x, weight, *given, **options)
    return (y * 1.01 if x.shape[1] > 1 and not torch.is_grad_enabled() else y), state


def spreads_nan(x: Tensor, weight: Tensor, *given: Any, segments: Segments | None = None, **options: Any) -> Any:
    """Hides pads by a product with zero, which hides no NaN."""
    if segments is None:
        return short_conv_taps(x, weight, *given, **options)
    y, state = short_conv_taps(x, weight, *given, segments=segments, **options)
    return y + 0 * (x * ~segments.real[..., None]).sum(), state


def looks_ahead(x: Tensor, weight: Tensor, *given: Any, segments: Segments | None = None, **options: Any) -> Any:
    """A long call is centred at its mean; the last token is in it."""
    y, state = short_conv_taps(x, weight, *given, segments=segments, **options)
    return (y + 1e-3 * x.mean(1, keepdim=True) if segments is None and x.shape[1] == 17 else y), state


def no_empty_calls(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
    x[:, -1]  # no last token in a call of none
    return short_conv_taps(x, weight, *given, **options)


BROKEN: dict[Callable[..., Any], str] = {
    wrong_gradient: "in torch.float64, length 1: gradient of bias",
    no_gradient_to_the_state: "length 1: gradient of initial_state",
    wrong_final_state: "in torch.float64, length 1: the final state",
    ignores_segments: "in torch.float64, documents ('1111122233'",
    wrong_inside_a_chunk: "in torch.float64, documents ('1111122233'",
    low_precision: "in torch.float32, length 1: y",
    rounds: "in torch.bfloat16: y: relative error",
    returns_float32: "y is torch.float32, the reference gives torch.bfloat16",
    no_half: "fails for train in float16, which why_not did not refuse: it must refuse in why_not, not fail (RuntimeError",
    needs_rows: "on inputs that are not contiguous",
    writes_state: "writes into initial_state, which is its caller's",
    wrong_decode: "decode in torch.float64, token 0",
    wrong_prefill: "prefill in torch.float64",
    spreads_nan: "with nan at pads",
    looks_ahead: "results up to 8 depend on later tokens (through x)",
    no_empty_calls: "IndexError",
}
"""What the message about each must say."""


@dataclass(frozen=True)
class Load:
    """What a record's ``load`` must be: a function that pickle knows."""

    function: Callable[..., Any]

    def __call__(self) -> Callable[..., Any]:
        return self.function


def record(function: Callable[..., Any], why_not: Callable[[KernelRequest], str | None] = always) -> Kernel:
    """The broken function as a kernel."""
    return Kernel("short_conv", function.__name__, -5, why_not, Load(function))


def refuse(reason: str, request: KernelRequest, **what: Any) -> str | None:
    """``reason`` for requests with these attributes."""
    return reason if all(getattr(request, name) == value for name, value in what.items()) else None


def refusing(reason: str, **what: Any) -> Callable[[KernelRequest], str | None]:
    """A ``why_not`` that pickle knows."""
    return partial(refuse, reason, **what)
