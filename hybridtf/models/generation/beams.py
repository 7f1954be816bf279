"""Beam search: the likeliest continuations of each prompt, several at a time.

At each step every running beam of a prompt is continued by every token, and the candidates are ordered by the sum of their
log-probabilities. Candidates among the first ``n_beams`` that end (a stop token, or the last step) are finished and scored by
``log_prob / length ** length_penalty``, the stop token counted; the best ``n_beams`` that do not end run on. These are the
choices of transformers, so that equal weights give equal beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.core import ConfigTable, reorder
from hybridtf.models.generation.model import evaluating, require, step
from hybridtf.models.generation.prompts import Prefix, check_prompts, prefill
from hybridtf.models.generation.sampling import finite
from hybridtf.models.language_model import LanguageModel


class BeamConfig(ConfigTable):
    """How beams are searched. ``n_beams = 1`` is greedy decoding."""

    max_new_tokens: int = Field(default=128, gt=0)
    n_beams: int = Field(default=4, gt=0)
    n_return: int = Field(default=1, gt=0)
    """Sequences returned a prompt, best first; at most ``n_beams``."""
    length_penalty: float = 1.0
    """Above 0 longer sequences gain, below 0 shorter ones; 0 compares sums of log-probabilities."""
    early_stopping: bool | Literal["never"] = False
    """When a prompt with ``n_beams`` finished sequences is done. True: at once. False: when its best running beam, scored at
    its present length, is no better than the worst finished one; a guess. "never": when no running beam can still be better,
    scored at the length that suits it best, which is exact."""
    stop_tokens: tuple[int, ...] = ()
    """A sequence ends with one of these, which is its last token."""
    prefill_chunk: int = Field(default=2048, gt=0)
    """Prompt tokens per forward."""

    @model_validator(mode="after")
    def _returns_what_it_has(self) -> Self:
        if self.n_return > self.n_beams:
            raise ValueError(f"n_return = {self.n_return} sequences cannot come from n_beams = {self.n_beams}")
        return self


@dataclass(frozen=True)
class Beam:
    """A finished sequence: its new tokens, the sum of their log-probabilities (nats), and the score it is ranked by."""

    tokens: tuple[int, ...]
    log_prob: float
    score: float


@dataclass
class _Search:
    """One prompt: its running beams, as rows of the batch in this order, and its finished ones, best first."""

    config: BeamConfig
    running: list[tuple[tuple[int, ...], float]] = field(default_factory=lambda: [((), 0.0)])
    finished: list[Beam] = field(default_factory=list)
    done: bool = False

    def advance(self, log_probs: Tensor) -> list[int]:
        """Continue the running beams by one token, from log-probabilities (beams vocab): the beam that each new one extends."""
        config, vocab = self.config, log_probs.shape[1]
        sums = log_probs + torch.tensor([total for _, total in self.running], dtype=torch.float64)[:, None]
        # Enough that n_beams of them do not end, whatever the others do.
        wide = max(2, 1 + len(config.stop_tokens)) * config.n_beams
        best = sums.flatten().topk(min(wide, sums.numel()))
        final = len(self.running[0][0]) + 1 == config.max_new_tokens
        following: list[tuple[tuple[int, ...], float]] = []
        parents: list[int] = []
        for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            beam, token = divmod(place, vocab)
            tokens = (*self.running[beam][0], token)
            if total == -float("inf"):
                break
            if final or token in config.stop_tokens:
                if rank < config.n_beams:
                    self._finish(tokens, total)
            elif len(following) < config.n_beams:
                following.append((tokens, total))
                parents.append(beam)
        self.running = following
        self.done = final or not following or self._enough()
        return [] if self.done else parents

    def _finish(self, tokens: tuple[int, ...], total: float) -> None:
        self.finished.append(Beam(tokens, total, total / len(tokens) ** self.config.length_penalty))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self.config.n_beams]

    def _enough(self) -> bool:
        config = self.config
        if len(self.finished) < config.n_beams:
            return False
        if config.early_stopping is True or config.n_beams == 1:
            return True
        tokens, total = self.running[0]
        longest = config.early_stopping == "never" and config.length_penalty > 0
        length = config.max_new_tokens if longest else len(tokens)
        return bool(total / length**config.length_penalty <= self.finished[-1].score)


def beam_search(
    model: LanguageModel, prompts: Sequence[Sequence[int]], config: BeamConfig | None = None, *, prefix: Prefix | None = None
) -> list[list[Beam]]:
    """The best sequences of every prompt, ``n_return`` each (fewer where there are no more), best first.

    Prompts of unequal lengths are one batch; a prompt that is done leaves it. Raises :class:`DataError` for an empty prompt
    or an unknown token, and :class:`ConfigError` for a model that cannot be cut in time.
    """
    config = config or BeamConfig()
    check_prompts(model, prompts, prefix)
    require(model, "cut", "generation")
    searches = [_Search(config) for _ in prompts]
    if searches:
        with evaluating(model):
            _search(model, prompts, searches, config, prefix)
    return [search.finished[: config.n_return] for search in searches]


def _search(
    model: LanguageModel, prompts: Sequence[Sequence[int]], searches: list[_Search], config: BeamConfig,
    prefix: Prefix | None,
) -> None:
    scores, state = prefill(model, prompts, config.prefill_chunk, config.max_new_tokens, prefix=prefix)
    while True:
        log_probs, first, index = finite(scores).log_softmax(-1), 0, []
        for search in (search for search in searches if not search.done):
            rows = len(search.running)
            index += [first + beam for beam in search.advance(log_probs[first : first + rows])]
            first += rows
        if not index:
            return
        if index != list(range(first)):
            state = reorder(state, torch.tensor(index))
        tokens = [search_tokens[-1] for search in searches if not search.done for search_tokens, _ in search.running]
        scores, state = step(model, torch.tensor(tokens), state)
