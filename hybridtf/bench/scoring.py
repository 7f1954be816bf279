"""Scoring documents: nats of every token, read whole with the state carried, or in windows; and any model for the windowed
evaluation of the train room.

Axes: b batch, t time, n documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hybridtf.bench.reading import Chunk, Stopped, read
from hybridtf.core import DataError, Law, Segments, State
from hybridtf.cost.calls import call, device_of, has_state, need_state
from hybridtf.cost.foreign import adapted
from hybridtf.models import LanguageModel, LanguageModelOutput
from hybridtf.models.generation.model import evaluating
from hybridtf.tasks import EvalDocument
from hybridtf.train.eval_rows import windows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


# -- windows: the evaluation of the train room, for any model ------------------------------------------------------


class AsLanguageModel(nn.Module):
    """A foreign model with the answers and the ``device`` that :func:`hybridtf.train.evaluate` asks of a language
    model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cannot: dict[Law, str] = {} if has_state(model) else {"cut": "it carries no state"}

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        need_state(self.model, "carried evaluation")
        return self.model.init_state(batch_size, max_len)  # type: ignore[operator]

    def forward(
        self, ids: Tensor, *, segments: Segments | None = None, state: State | None = None
    ) -> LanguageModelOutput:
        return LanguageModelOutput(*call(self.model, ids, segments=segments, state=state), {})


def as_language_model(model: nn.Module) -> LanguageModel:
    """``model`` itself, or behind :class:`AsLanguageModel`."""
    return model if isinstance(model, LanguageModel) else cast(LanguageModel, AsLanguageModel(adapted(model)))


# -- whole documents, state carried --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carried:
    """``nats`` (n t, float64): of each document's first t tokens; NaN from where reading ended, which ``stopped`` says, the
    earliest end of any document. ``largest_state``: (position, size) after each call, the largest over the documents."""

    nats: NDArray[Any]
    stopped: Stopped | None = None
    largest_state: tuple[tuple[int, float], ...] = ()


def score_carried(
    model: nn.Module, documents: Sequence[EvalDocument], *, length: int, chunk: int, batch_size: int,
    ends: Sequence[int] = (), timeout: float | None = None, progress: Callable[[], None] | None = None,
) -> Carried:
    """Nats of the first ``length`` tokens of each document, which all have as many.

    Read ``chunk`` tokens a call with the state carried, so that activation memory does not grow with ``length``. A
    model without a state, or one that says it cannot be cut, reads all of them in one call. Where a document ended
    early, those after it are read no further. ``timeout``: seconds, over all documents, that the positions up to each
    of ``ends`` from the one before it may take.
    """
    short = [d.name for d in documents if len(d.targets) < length]
    if short:
        raise DataError(f"{short[0]}: shorter than the {length} tokens to be read")
    kept = _Kept(np.full((len(documents), length), np.nan), list(ends) or [length], timeout)
    with evaluating(model), torch.no_grad():
        for first in range(0, len(documents), batch_size):
            part = documents[first : first + batch_size]
            stop = length if kept.stopped is None else kept.stopped.at
            inputs, targets = (torch.stack([getattr(d, name)[:stop] for d in part]) for name in ("inputs", "targets"))
            if not stop:
                break
            try:
                began = time.monotonic()
                for piece in read(model, inputs, targets, chunk=chunk):
                    kept.add(first, piece, time.monotonic() - began)
                    began = time.monotonic()
                    if progress is not None:
                        progress()
            except Stopped as ended:
                kept.stopped = ended
    return Carried(kept.nats, kept.stopped, tuple(sorted(kept.largest.items())))


@dataclass
class _Kept:
    """What was scored so far, and the seconds that each length took."""

    nats: NDArray[Any]
    ends: list[int]
    timeout: float | None
    stopped: Stopped | None = None

    def __post_init__(self) -> None:
        self.spent = [0.0] * len(self.ends)
        self.largest: dict[int, float] = {}

    def add(self, first: int, piece: Chunk, seconds: float) -> None:
        """Raises :class:`Stopped` where the length that the chunk is of had its time."""
        self.nats[first : first + len(piece.nats), piece.start : piece.stop] = piece.nats.numpy()
        if (size := piece.largest_state) is not None:
            self.largest[piece.stop] = max(size, self.largest.get(piece.stop, 0.0))
        i = min(int(np.searchsorted(self.ends, piece.start, side="right")), len(self.ends) - 1)
        self.spent[i] += seconds
        if self.timeout is not None and self.spent[i] > self.timeout and piece.stop not in self.ends:
            raise Stopped("timed_out", piece.stop, f"out of time after {piece.stop} tokens")


# -- sliding windows -------------------------------------------------------------------------------------------------


def score_windows(
    model: nn.Module, documents: Sequence[EvalDocument], *, window: int, stride: int, chunk: int, batch_size: int,
    deadline: float | None = None, progress: Callable[[], None] | None = None,
) -> NDArray[Any]:
    """(n) nats of whole documents of ``window`` tokens or more, in windows that move by ``stride``: each token is scored
    once, behind ``window - stride`` others at least but for the first window (Peng et al., *YaRN*,
    https://arxiv.org/abs/2309.00071). Each window begins with an empty state and is read ``chunk`` tokens a call. Raises
    :class:`Stopped`.
    """
    short = [d.name for d in documents if len(d.targets) < window]
    if short:
        raise DataError(f"{short[0]}: shorter than a window of {window} tokens")
    places = [(i, *place) for i, d in enumerate(documents) for place in windows_of(len(d.targets), window, stride)]
    nats = np.zeros(len(documents))
    with evaluating(model), torch.no_grad():
        for first in range(0, len(places), batch_size):
            part = places[first : first + batch_size]
            inputs, targets = (
                torch.stack([getattr(documents[i], name)[start:stop] for i, start, stop, _ in part])
                for name in ("inputs", "targets")
            )
            for piece in read(model, inputs, targets, chunk=chunk, deadline=deadline):
                for row, (i, start, _, scored) in zip(piece.nats.numpy(), part, strict=True):
                    nats[i] += row[max(scored - start - piece.start, 0) :].sum()
            if progress is not None:
                progress()
    return nats
