"""Scoring documents: nats of every token, read whole with the state carried; and any model for the windowed evaluation.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import DataError, Law, LengthError, Segments, State
from hybridtf.cost.calls import IGNORED, call, device_of, has_state, need_state
from hybridtf.cost.foreign import adapted
from hybridtf.models import LanguageModel, LanguageModelOutput
from hybridtf.models.generation.model import evaluating, refusal
from hybridtf.tasks import EvalDocument

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(b t) float64 negative log-likelihoods; 0 where nothing is scored. In float32 at least."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    nats = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return nats.view(targets.shape).double()


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
    """``nats`` (n t, float64): of each document's first t tokens; NaN from where the model could not go on (``stopped``
    says why)."""

    nats: NDArray[Any]
    stopped: str | None = None


def score_carried(
    model: nn.Module, documents: Sequence[EvalDocument], *, length: int, chunk: int, batch_size: int,
    progress: Callable[[], None] | None = None,
) -> Carried:
    """Nats of the first ``length`` tokens of each document, which all have as many.

    Read ``chunk`` tokens a call with the state carried, so that activation memory does not grow with ``length``. A
    model without a state, or one that says it cannot be cut, reads all of them in one call.
    """
    short = [d.name for d in documents if len(d.targets) < length]
    if short:
        raise DataError(f"{short[0]}: shorter than the {length} tokens to be read")
    rows, stopped = [], None
    chunk = chunk if has_state(model) and refusal(model, "cut") is None else length
    with evaluating(model), torch.no_grad():
        for first in range(0, len(documents), batch_size):
            part = documents[first : first + batch_size]
            inputs = torch.stack([d.inputs[:length] for d in part])
            targets = torch.stack([d.targets[:length] for d in part])
            nats, why = _carry(model, inputs, targets, chunk, progress)
            rows.append(nats)
            stopped = stopped or why
    return Carried(torch.cat(rows).numpy(), stopped)


def _carry(
    model: nn.Module, inputs: Tensor, targets: Tensor, chunk: int, progress: Callable[[], None] | None
) -> tuple[Tensor, str | None]:
    device = device_of(model)
    nats = torch.full(targets.shape, torch.nan, dtype=torch.float64)
    state: State | None = model.init_state(len(inputs)) if has_state(model) else None  # type: ignore[operator]
    for start in range(0, inputs.shape[1], chunk):
        part = slice(start, start + chunk)
        try:
            logits, state = call(model, inputs[:, part].to(device), state=state)
        except LengthError as error:
            return nats, f"no further than {start} tokens: {error}"
        nats[:, part] = token_nats(logits, targets[:, part].to(device)).cpu()
        if progress is not None:
            progress()
    return nats, None
