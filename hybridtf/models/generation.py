"""Generation: prompts of any lengths in, tokens out, through the state that every mixer carries.

A batch gives each row exactly what its prompt gives alone: rows are padded on the right and said so in segments, and each
row draws from a generator of its own. Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.core import ConfigTable, DataError, NonFiniteError, Segments, State, reorder
from hybridtf.models.language_model import LanguageModel


class GenerationConfig(ConfigTable):
    """How tokens are chosen. ``temperature = 0`` is greedy; ``top_k`` and ``top_p`` cut the distribution, in that order."""

    max_new_tokens: int = Field(default=128, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, gt=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int = 0
    """Row i of a batch draws from seed + i: alone, with that seed, it draws the same."""
    stop_tokens: tuple[int, ...] = ()
    """A row ends when it draws one of these, which is its last token."""
    prefill_chunk: int = Field(default=2048, gt=0)
    """Prompt tokens per forward: activation memory of the prefill does not grow with the prompt."""

    @model_validator(mode="after")
    def _greedy_draws_nothing(self) -> Self:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature above 0")
        return self


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of one row. ``log_prob`` (nats) is the model's own, before temperature and cuts."""

    row: int
    token: int
    log_prob: float
    last: bool


def generate(model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig | None = None) -> list[list[int]]:
    """The new tokens of every prompt; see :func:`stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for item in stream(model, prompts, config):
        rows[item.row].append(item.token)
    return rows


def stream(
    model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig | None = None
) -> Iterator[GeneratedToken]:
    """Yield tokens as they are drawn, row by row within a step.

    Raises :class:`DataError` for an empty prompt, and :class:`LengthError` where a learned position table is too short.
    """
    config = config or GenerationConfig()
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence | Tensor):
            raise DataError(f"prompts are sequences of token ids, one each; prompt {row} is of type {type(prompt).__name__}")
        if not len(prompt):
            raise DataError(f"prompt {row} is empty; give at least one token")
    if not len(prompts):
        return
    training = model.training
    model.eval()
    try:
        yield from _stream(model, prompts, config)
    finally:
        model.train(training)


def _stream(model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Iterator[GeneratedToken]:
    generators = [torch.Generator().manual_seed(config.seed + row) for row in range(len(prompts))]
    rows = list(range(len(prompts)))
    scores, state = prefill(model, prompts, config.prefill_chunk, config.max_new_tokens)
    for step in range(config.max_new_tokens):
        tokens, log_probs = choose(scores, config, [generators[row] for row in rows])
        final = step + 1 == config.max_new_tokens
        ended = [final or int(token) in config.stop_tokens for token in tokens]
        for row, token, log_prob, last in zip(rows, tokens.tolist(), log_probs.tolist(), ended, strict=True):
            yield GeneratedToken(row, token, log_prob, last)
        if all(ended):
            return
        if any(ended):
            kept = [i for i, last in enumerate(ended) if not last]
            index = torch.tensor(kept, device=model.device)
            rows, tokens, state = [rows[i] for i in kept], tokens[kept], reorder(state, index)
        scores, state = _step(model, tokens, state)


@torch.no_grad()
def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], chunk: int, room: int
) -> tuple[Tensor, State]:
    """Read prompts of any lengths, ``chunk`` columns at a time: scores (b vocab) after each one's last token, and the state.

    The state has room for ``room`` more tokens.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    width = int(lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64, device=model.device)
    segments = None
    if int(lengths.min()) < width:
        segments = Segments.from_mask(torch.arange(width, device=model.device) < lengths[:, None])
    state = model.init_state(len(prompts), max_len=width + room)
    scores: Tensor | None = None
    for start in range(0, width, chunk):
        stop = min(start + chunk, width)
        part = None if segments is None else segments.narrow(start, stop)
        out = model(ids[:, start:stop], segments=part, state=state, logits="last")
        ends_here = ((lengths > start) & (lengths <= stop))[:, None]
        scores = out.logits if scores is None else torch.where(ends_here, out.logits, scores)
        state = out.state
    assert scores is not None
    return scores, state


@torch.no_grad()
def _step(model: LanguageModel, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    out = model(tokens.to(model.device)[:, None], state=state, logits="last")
    return out.logits, out.state


def choose(scores: Tensor, config: GenerationConfig, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Draw one token a row from scores (b vocab): tokens (b) and their log-probabilities (b), on the CPU.

    By inversion of the distribution function at one uniform number a row, so that a row's draw does not depend on others.
    Raises :class:`NonFiniteError` where scores are NaN or infinite.
    """
    scores = scores.detach().to("cpu", torch.float64)
    bad = scores.isnan().any(-1) | scores.isposinf().any(-1)
    if bool(bad.any()):
        raise NonFiniteError(f"the model's scores for row {int(bad.nonzero()[0])} of the batch are not finite")
    log_probs = scores.log_softmax(-1)
    if config.temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        # Sorted once; a cut is then a prefix. Ties keep the order of ids.
        ordered, ids = (log_probs / config.temperature).sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        if config.top_k is not None:
            probs[:, config.top_k :] = 0
        if config.top_p is not None:
            probs = probs / probs.sum(-1, keepdim=True)
            before = probs.cumsum(-1) - probs
            probs = torch.where(before < config.top_p, probs, torch.zeros_like(probs))
        total = probs.cumsum(-1)
        draw = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
        place = torch.searchsorted(total, (draw * total[:, -1])[:, None], right=True)
        last = (probs > 0).sum(-1, keepdim=True) - 1
        tokens = ids.gather(1, torch.minimum(place, last))[:, 0]
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]
