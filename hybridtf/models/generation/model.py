"""What every way of generating asks of a model before and while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridtf.core import ConfigError, Law, LengthError, State
from hybridtf.models.language_model import LanguageModel
from hybridtf.nn import LearnedPosition


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside, dropout is off; the mode of every part comes back (one may have been frozen by ``eval``)."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def refusal(model: nn.Module, law: Law) -> str | None:
    """The part of the model that declares that it breaks ``law``, with its reason; None where none does."""
    for name, module in model.named_modules():
        reason = getattr(module, "cannot", {}).get(law)
        if reason is not None:
            return f"{name} ({type(module).__name__}) says: {reason}"
    return None


def require(model: nn.Module, law: Law, what: str) -> None:
    """Raise :class:`ConfigError` where a part of the model declares that it cannot do what ``what`` needs."""
    reason = refusal(model, law)
    if reason is not None:
        raise ConfigError(f"{what} is not possible with this model: {reason}")


@torch.no_grad()
def step(model: LanguageModel, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    """One token a row (b): scores (b vocab) and the new state."""
    out = model(tokens.to(model.device)[:, None], state=state, logits="last")
    assert out.logits is not None
    return out.logits, out.state


class PositionLimit:
    """How many tokens the model can place: the shortest learned position table, which compiled code cannot check."""

    def __init__(self, model: LanguageModel) -> None:
        tables = [module.table.shape[0] for module in model.modules() if isinstance(module, LearnedPosition)]
        self.limit = min(tables, default=None)

    def check(self, tokens: int) -> None:
        """Raise :class:`LengthError` for a document of that many tokens, where it is too long."""
        if self.limit is not None and tokens > self.limit:
            raise LengthError(f"a document of {tokens} tokens is longer than the learned position table of {self.limit}")
