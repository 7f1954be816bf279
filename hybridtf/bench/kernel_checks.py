"""No speed of a wrong kernel: what a model chose is held against the reference, on the very calls that are timed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtf.bench.kernel_calls import Call, Cut, cut_of, mapped, tensors

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far results and gradients as a whole may be from the reference in float64: root mean squares, relative. A call is
held to that of the coarsest of its arguments, whose precision its results and gradients may have."""

LEAST = 1e-2
"""What is smaller than this share of the largest result (or gradient) of a call is held to that share: rounding is all there is
to a gradient that should be zero."""

TOKEN_FACTOR = 10.0
"""How many times :data:`TOLERANCE` a single token may be off. Of all mixers' kernels that pass as a whole, in rows of 40 and
200 tokens, the worst token is off by 3.3 times in bfloat16 and 0.6 times in float32, in gradients."""

LEAST_TOKEN = 0.1
"""A token that is smaller than this share of the whole tensor is held to that share: what cancels keeps its rounding."""


@dataclass(frozen=True)
class Check:
    """Whether one call of a kernel is right. ``on``: what part was compared; ``why``: what is wrong, None where nothing is."""

    call: Call
    on: str
    error: float | None
    tolerance: float
    why: str | None

    @property
    def words(self) -> str:
        """One line on what is wrong."""
        return f"kernel {self.call.kernel!r} of {self.call.op} in {self.call.phase}: {self.why}"


def to_records(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The record's field ``checks``: of each kernel and phase the worst of its calls, and how many there were."""
    groups: dict[tuple[str, str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.call.op, check.call.kernel, check.call.phase), []).append(check)
    return [_of_group(group) for group in groups.values()]


def _of_group(group: Sequence[Check]) -> dict[str, Any]:
    worst = max(group, key=lambda check: (check.why is not None, check.error or 0.0))
    call = worst.call
    return {
        "op": call.op, "kernel": call.kernel, "phase": call.phase, "dtype": str(call.dtype).removeprefix("torch."),
        "calls": len(group), "shapes": call.shapes, "against": "reference in float64", "on": worst.on, "error": worst.error,
        "tolerance": worst.tolerance, "passed": worst.why is None, "why": worst.why,
    }


def check_calls(
    calls: Sequence[Call], device: torch.device, autocast: torch.dtype | None = None
) -> list[Check]:
    """A check of every call; none raises. ``autocast``: what the calls were made under."""
    return [check_call(call, device, autocast) for call in calls]


def check_call(call: Call, device: torch.device, autocast: torch.dtype | None = None) -> Check:
    """The kernel on the whole call against the reference in float64 on as much of it as that can do in little time: results,
    and in training the gradients of every argument. Dropout, which is random, is left out."""
    tolerance, on = max(TOLERANCE[x.dtype] for x in tensors(call.arguments)), "nothing"
    # The border to other people's code: whatever a kernel raises is what is wrong with it.
    try:
        with torch.set_grad_enabled(call.phase == "train"):
            given, exact = arguments_of(call, device), arguments_of(call, device, torch.float64)
            with _autocast(device, autocast):
                out = call.call(call.function, given)
            cut = cut_of(call, out)
            on = cut.words
            with _autocast(device, None):
                want = call.call(call.reference, cut.arguments(exact))
            error, why = _compare(call, cut, (given, out), (exact, want), tolerance)
    except Exception as error_raised:
        return Check(call, on, None, tolerance, f"it could not be checked: {type(error_raised).__name__}: {error_raised}")
    return Check(call, on, error, tolerance, why)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def arguments_of(call: Call, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments on the device, floating ones in ``dtype`` (None: as they were), watched by autograd in training."""
    def ready(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(device, copy=True)
        return x.to(device, dtype=dtype or x.dtype, copy=True).requires_grad_(torch.is_grad_enabled())

    arguments: dict[str, Any] = mapped(call.arguments, ready)
    return arguments | ({"dropout_p": 0.0} if "dropout_p" in arguments else {})


def _compare(
    call: Call, cut: Cut, ours: tuple[dict[str, Any], Any], theirs: tuple[dict[str, Any], Any], tolerance: float
) -> tuple[float | None, str | None]:
    """The largest error, None where there is none to tell, and what is wrong."""
    got, want = cut.results(ours[1]), cut.comparable(theirs[1])
    shapes = [[tuple(x.shape) for x in results] for results in (got, want)]
    if shapes[0] != shapes[1]:
        return None, f"results of the shapes {shapes[0]}, expected {shapes[1]}"
    error, why = _worst("results", got, want, tolerance)
    if why is None and call.phase == "train":
        weights = _weights(got)
        gradients, exact = _gradients(got, ours[0], weights), _gradients(want, theirs[0], weights)
        gradient_error, why = _worst("gradients", gradients, exact, tolerance)
        error = max(error or 0.0, gradient_error) if gradient_error is not None else None
    return error, why


def _weights(results: Sequence[Tensor]) -> list[Tensor]:
    """For each result numbers that its dtype can hold, so that kernel and reference are given the same."""
    return [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x) for i, x in enumerate(results)]


def _gradients(results: Sequence[Tensor], arguments: dict[str, Any], weights: Sequence[Tensor]) -> list[Tensor]:
    """Of a weighted sum of the results, for every argument of floating point."""
    given, seen = tensors(arguments), [(x, w.to(x)) for x, w in zip(results, weights, strict=True) if x.requires_grad]
    if not seen or not given:
        return [torch.zeros_like(x) for x in given]
    of, slopes = zip(*seen, strict=True)
    return list(torch.autograd.grad(of, given, slopes, allow_unused=True, materialize_grads=True))


def _worst(
    what: str, got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> tuple[float | None, str | None]:
    """The largest error of a whole tensor, None where it is no number, and what is wrong: of a tensor, or of one token, whose
    fault a mean over many tokens would hide."""
    sizes = [_size(x.detach().double(), 0) if x.numel() else 0.0 for x in want]
    least = LEAST * max(map(float, sizes), default=0.0)
    worst = 0.0
    for ours, theirs, size in zip(got, want, sizes, strict=True):
        if not ours.numel():
            continue
        scale = max(float(size), least)
        difference = ours.detach().double() - theirs.detach()
        wrong = float(_size(difference, 0))
        error = wrong / scale if scale > 0 else wrong
        if not error <= tolerance:  # true for NaN
            return (error if math.isfinite(error) else None), (
                f"{what} are wrong by {error:.1e} of their size; at most {tolerance:.0e} is rounding"
            )
        worst = max(worst, error)
        if scale > 0 and (why := _worst_token(what, difference, theirs.detach().double(), scale, tolerance * TOKEN_FACTOR)):
            return error, why
    return worst, None


def _worst_token(what: str, difference: Tensor, want: Tensor, scale: float, tolerance: float) -> str | None:
    """What is wrong with the worst token of a tensor (b t ...) of root mean square ``scale``; None where nothing is. Of tensors
    with fewer than three axes, which have no token of several numbers, the whole tells."""
    if want.ndim < 3:
        return None
    errors = _size(difference, 2) / _size(want, 2).clamp(min=LEAST_TOKEN * scale)
    place = int(errors.argmax())
    error = float(errors.flatten()[place])
    if error <= tolerance:
        return None
    row, token = divmod(place, want.shape[1])
    return f"{what} of token {token} of row {row} are wrong by {error:.1e} of its size; at most {tolerance:.0e} is rounding"


def _size(x: Tensor, axes: int) -> Tensor:
    """The root mean squares over all but the first ``axes`` axes."""
    return x.flatten(axes).square().mean(-1).sqrt()
