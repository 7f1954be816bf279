"""From scores to a token: the cuts of :class:`GenerationConfig`, and draws that depend on nothing but their own row.

All of it runs in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core import NonFiniteError
from hybridtf.models.generation.config import GenerationConfig


class Seen:
    """Which tokens each row's text holds, for ``repetition_penalty``; keeps nothing where there is none."""

    def __init__(self, config: GenerationConfig, texts: Sequence[Sequence[int]]) -> None:
        self.wanted = config.repetition_penalty != 1
        self.rows: list[Tensor] = []
        if self.wanted:
            self.rows = [torch.as_tensor(text, dtype=torch.int64).cpu().unique() for text in texts]

    def add(self, row: int, token: int) -> None:
        """Row ``row`` of the texts goes on with ``token``."""
        if self.wanted and not bool((self.rows[row] == token).any()):
            self.rows[row] = torch.cat([self.rows[row], torch.tensor([token])])

    def of(self, rows: Sequence[int], more: Sequence[Sequence[int]] | None = None) -> list[Tensor] | None:
        """The ids that each of these rows holds, and ``more`` of each; None where nobody asks."""
        if not self.wanted:
            return None
        found = [self.rows[row] for row in rows]
        if more is not None:
            found = [torch.cat([ids, torch.as_tensor(new, dtype=torch.int64)]) for ids, new in zip(found, more, strict=True)]
        return found


def choose(
    scores: Tensor, config: GenerationConfig, generators: Sequence[torch.Generator], seen: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from scores (b vocab): tokens (b) and their log-probabilities (b), on the CPU.

    By inversion of the distribution function at one uniform number a row, so that a row's draw does not depend on others.
    ``seen``: the ids that each row's text holds, for ``repetition_penalty``. The log-probabilities (nats) are the model's
    own, before all of it. Raises :class:`NonFiniteError` where scores are NaN or infinite.
    """
    scores = finite(scores)
    log_probs = scores.log_softmax(-1)
    scores = _penalised(scores, config.repetition_penalty, seen)
    if config.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        probs, ids = _cut(scores, config)
        place = torch.stack([invert(row, uniform(g)) for row, g in zip(probs, generators, strict=True)])
        tokens = ids.gather(1, place[:, None])[:, 0]
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def distribution(scores: Tensor, config: GenerationConfig, seen: Sequence[Tensor] | None = None) -> Tensor:
    """(b vocab) float64 on the CPU: the probability with which :func:`choose` takes each token; one-hot where greedy."""
    scores = _penalised(finite(scores), config.repetition_penalty, seen)
    if config.temperature == 0:
        return torch.zeros_like(scores).scatter(1, scores.argmax(-1, keepdim=True), 1.0)
    probs, ids = _cut(scores, config)
    return torch.zeros_like(scores).scatter(1, ids, probs / probs.sum(-1, keepdim=True))


def uniform(generator: torch.Generator) -> Tensor:
    """One number in [0, 1)."""
    return torch.rand((), generator=generator, dtype=torch.float64)


def invert(probs: Tensor, draw: Tensor) -> Tensor:
    """The place in probs (n, any positive sum) at which the share ``draw`` of their sum is reached; never one of weight 0."""
    total = probs.cumsum(-1)
    place = torch.searchsorted(total, (draw * total[-1])[None], right=True)[0]
    last = probs.nonzero()[-1, 0]
    return torch.minimum(place, last)


def finite(scores: Tensor) -> Tensor:
    """Scores (b vocab) in float64 on the CPU. -inf is a token that cannot come; NaN, inf and a row of -inf are refused."""
    scores = scores.detach().to("cpu", torch.float64)
    bad = ~scores.amax(-1).isfinite()  # a NaN is the largest
    if bool(bad.any()):
        raise NonFiniteError(f"the model's scores for row {int(bad.nonzero()[0])} of the batch are not finite")
    return scores


def _penalised(scores: Tensor, penalty: float, seen: Sequence[Tensor] | None) -> Tensor:
    if seen is None or penalty == 1:
        return scores
    scores = scores.clone()
    for row, ids in zip(scores, seen, strict=True):
        held = row[ids]
        row[ids] = torch.where(held < 0, held * penalty, held / penalty)
    return scores


def _cut(scores: Tensor, config: GenerationConfig) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature and cuts, likeliest first, not summing to one; and the ids they belong to."""
    # From the largest on, so that a tiny temperature overflows to certainty. Ties keep the order of ids.
    scores = (scores - scores.amax(-1, keepdim=True)) / config.temperature
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    if config.top_k is not None:
        probs[:, config.top_k :] = 0
    if config.top_p is not None:
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        probs = torch.where(before < config.top_p, probs, torch.zeros_like(probs))
    if config.min_p is not None:
        probs = torch.where(probs >= config.min_p * probs[:, :1], probs, torch.zeros_like(probs))
    return probs, ids
