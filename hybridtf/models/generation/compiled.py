"""A decode step that is compiled once, over a batch of fixed places whose memory never moves.

The step is one graph: the model's call, and the copy of what it returned into the memory of the state that it was given. Its
inputs keep their addresses from step to step, which is what a CUDA graph needs as well. Rows that end leave their place as
it is until another prompt takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybridtf.core import ConfigError, State, overwrite, own_memory, write_rows
from hybridtf.models.generation.model import PositionLimit
from hybridtf.models.language_model import LanguageModel

Step = Callable[[LanguageModel, Tensor, State], Tensor]

_GRAPHS = 64
"""Graphs of one model: one for each batch size and each capacity."""

_steps: WeakKeyDictionary[LanguageModel, dict[str, Step]] = WeakKeyDictionary()


def capacity_for(length: int) -> int:
    """Slots for rows of that many tokens: multiples of 256, so that prompts of other lengths find the same graph."""
    return -(-length // 256) * 256


def decode_step(model: LanguageModel, tokens: Tensor, state: State) -> Tensor:
    """One token a row (b): scores (b vocab). The state is changed in place."""
    out = model(tokens[:, None], state=state, logits="last")
    overwrite(state, out.state)
    scores: Tensor = out.logits
    return scores


def compiled_step(model: LanguageModel, backend: str) -> Step:
    """:func:`decode_step` of this model, compiled when it is first called; the same one at every later request.

    Raises :class:`ConfigError` for a backend that torch does not know.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile_backend = {backend!r} is not known to torch.compile. Known: {', '.join(known)}")
    made = _steps.setdefault(model, {})
    if backend not in made:
        # Compiled graphs hang on a code object and are limited in number: each model has one of its own.
        own = FunctionType(decode_step.__code__.replace(), decode_step.__globals__, decode_step.__name__)
        made[backend] = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)
    return made[backend]


class CompiledRows:
    """Places (p) of a batch: those of ``slots`` run, in that order."""

    def __init__(self, model: LanguageModel, backend: str, scores: Tensor, state: State) -> None:
        self.model, self.run = model, compiled_step(model, backend)
        self.all_scores, self.state = scores, own_memory(state)
        self.slots = list(range(len(scores)))
        self.input = torch.zeros(len(scores), dtype=torch.int64, device=model.device)
        self.limit = PositionLimit(model)

    @property
    def scores(self) -> Tensor:
        """(b vocab) of the running rows."""
        return self.all_scores[self.slots]

    @torch.no_grad()
    def step(self, tokens: Tensor, kept: list[int], lengths: list[int], fresh: tuple[Tensor, State] | None) -> None:
        """Rows ``kept`` go on with their ``tokens`` (of all rows so far), to ``lengths``; then ``fresh`` ones join."""
        self.slots = [self.slots[i] for i in kept]
        if kept:
            self.limit.check(max(lengths))
            self.input.zero_()
            self.input[self.slots] = tokens[kept].to(self.input.device)
            self._run()
        if fresh is not None:
            scores, state = fresh
            free = [slot for slot in range(len(self.input)) if slot not in self.slots][: len(scores)]
            index = torch.tensor(free, device=self.input.device)
            write_rows(self.state, index, state)
            self.all_scores = self.all_scores.index_copy(0, index, scores)
            self.slots += free

    def _run(self) -> None:
        try:
            with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
                self.all_scores = self.run(self.model, self.input, self.state)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"this model has {_GRAPHS} compiled decode steps already, one for each batch size and capacity: use fewer "
                "sizes (batch_size), or call torch.compiler.reset()"
            ) from error
