"""Reading rows of any length: the state is carried from call to call, and what ends a reading early is an answer.

Out of memory, out of time and a score that is not finite are results of a long reading, not errors of it. Axes: b batch,
t time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridtf.bench.environment import main_memory
from hybridtf.bench.outcomes import out_of_memory
from hybridtf.core import ConvWindow, Fixed, LengthError, Segments, State, leaves
from hybridtf.cost import state_size
from hybridtf.cost.calls import IGNORED, call, device_of, has_state
from hybridtf.cost.foreign import has_known_state
from hybridtf.models.generation.model import refusal
from hybridtf.train.eval_rows import cut_segments, only_documents

Result: TypeAlias = Literal["ok", "out_of_memory", "timed_out", "non_finite", "not_run"]
RESULTS: tuple[Result, ...] = ("ok", "out_of_memory", "timed_out", "non_finite", "not_run")
"""What became of a length."""


class Stopped(Exception):
    """A reading that ended early: ``result``, and ``at``, the position from which nothing was scored."""

    def __init__(self, result: Result, at: int, reason: str) -> None:
        super().__init__(reason)
        self.result, self.at, self.reason = result, at, reason


@dataclass(frozen=True)
class Lengths:
    """What is measured: ``ends`` (tokens, rising), of a model trained on ``trained`` tokens, ``chunk`` tokens a call,
    ``batch_size`` rows at once, at most ``timeout`` seconds a length."""

    trained: int
    ends: tuple[int, ...]
    chunk: int
    batch_size: int
    timeout: float | None
    progress: Callable[[], None] | None = None

    def fields(self) -> dict[str, Any]:
        """What every record of extrapolation says."""
        ratios = [end // self.trained if end % self.trained == 0 else end / self.trained for end in self.ends]
        return {"trained_length": self.trained, "multiples": ratios, "lengths": list(self.ends), "chunk": self.chunk,
                "timeout": self.timeout}


@dataclass(frozen=True)
class Chunk:
    """What one call answered: the columns ``start:stop``; ``nats`` (b t, float64, 0 where nothing is scored) and ``right``
    (b t) of them, on the CPU; the ``state`` after them."""

    start: int
    stop: int
    nats: Tensor
    right: Tensor
    state: State | None

    @property
    def largest_state(self) -> float | None:
        """The largest size of a number in the recurrent states; None where the model has none. What grows without bound is
        what later overflows."""
        sizes = [
            float(tensor.abs().max())
            for leaf in leaves(self.state) if isinstance(leaf, Fixed) and not isinstance(leaf, ConvWindow)
            for tensor in leaf.data.values() if tensor.is_floating_point() and tensor.numel()
        ]
        return max(sizes, default=None)


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(b t) float64 negative log-likelihoods; 0 where nothing is scored. In float32 at least."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    nats = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return nats.view(targets.shape).double()


def columns_a_call(model: nn.Module, chunk: int, length: int) -> int:
    """``chunk``, or all of ``length`` for a model that has no state or says that it cannot be cut."""
    return min(chunk, length) if has_state(model) and refusal(model, "cut") is None else length


def read(
    model: nn.Module, inputs: Tensor, targets: Tensor, segments: Segments | None = None, *, chunk: int,
    deadline: float | None = None,
) -> Iterator[Chunk]:
    """The rows ``inputs`` (b t), ``chunk`` columns a call with the state carried (see :func:`columns_a_call`), without
    gradients where the caller says so.

    Memory beside the rows does not grow with t but by the state. Raises :class:`Stopped` where the model cannot place more
    tokens, memory does not suffice, ``time.monotonic()`` passes ``deadline`` (looked at between calls), or a score is NaN, an
    infinity above, or the nats of a target are not finite; the columns before it were given.
    """
    device, length = device_of(model), inputs.shape[1]
    chunk = columns_a_call(model, chunk, length) if only_documents(segments) else length
    state: State | None = model.init_state(len(inputs)) if has_state(model) else None  # type: ignore[operator]
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        if deadline is not None and time.monotonic() > deadline:
            raise Stopped("timed_out", start, f"out of time after {start} tokens")
        marks = None if segments is None else cut_segments(segments, start, stop).to(device)
        logits, state = _answer(model, inputs[:, start:stop].to(device), marks, state, start)
        wanted = targets[:, start:stop].to(device)
        nats, right = token_nats(logits, wanted), (logits.argmax(-1) == wanted).cpu()
        bad = (logits.isnan() | (logits == torch.inf)).any(-1) | ~nats.isfinite()
        del logits
        if bool(bad.any()):
            good = int(bad.any(0).int().argmax())
            if good:
                yield Chunk(start, start + good, nats[:, :good].cpu(), right[:, :good], None)
            raise Stopped("non_finite", start + good, f"scores are not finite from position {start + good} on")
        yield Chunk(start, stop, nats.cpu(), right, state)


def _answer(
    model: nn.Module, ids: Tensor, segments: Segments | None, state: State | None, start: int
) -> tuple[Tensor, State | None]:
    try:
        return call(model, ids, segments=segments, state=state)
    except LengthError as error:
        raise Stopped("not_run", start, f"no further than {start} tokens: {error}") from None
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise Stopped("out_of_memory", start, f"out of memory after {start} tokens") from None


def rows_that_fit(model: nn.Module, length: int, n_rows: int) -> int:
    """As many of ``n_rows`` rows of ``length`` tokens as the memory of this machine holds the state of. Raises
    :class:`Stopped` where it holds none.

    On a CPU nothing refuses memory in time: the process is ended, and the sweep with it. A GPU refuses by itself.
    """
    if device_of(model).type != "cpu" or not has_known_state(model):
        return n_rows
    need, there = state_size(model, length)["used"], main_memory()
    if there is None:
        return n_rows
    if need > there:
        raise Stopped("out_of_memory", 0, f"the state of a row takes {need:,} of {there:,} bytes of memory")
    return min(n_rows, there // need) if need else n_rows
