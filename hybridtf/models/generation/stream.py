"""Tokens as they are drawn, from batches whose rows end at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.core import ConfigError, State, concat_rows, reorder
from hybridtf.models.generation.compiled import CompiledRows, capacity_for
from hybridtf.models.generation.config import GenerationConfig
from hybridtf.models.generation.model import evaluating, require, step
from hybridtf.models.generation.prompts import Prefix, check_prompts, needed_length, prefill
from hybridtf.models.generation.sampling import Seen, choose
from hybridtf.models.language_model import LanguageModel


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of one row. ``log_prob`` (nats) is the model's own, before temperature and cuts."""

    row: int
    token: int
    log_prob: float
    last: bool


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig | None = None, *,
    batch_size: int | None = None, prefix: Prefix | None = None,
) -> list[list[int]]:
    """The new tokens of every prompt; see :func:`stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for item in stream(model, prompts, config, batch_size=batch_size, prefix=prefix):
        rows[item.row].append(item.token)
    return rows


def stream(
    model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig | None = None, *,
    batch_size: int | None = None, prefix: Prefix | None = None, ends: Callable[[int, int], bool] | None = None,
) -> Iterator[GeneratedToken]:
    """Yield tokens as they are drawn, row by row within a step.

    At most ``batch_size`` rows run at once (None: all); where one ends, the next prompt takes its place. After a ``prefix``
    (:func:`read_prompt`) the prompts are its continuations, and may be empty. ``ends`` is asked about each (row, token):
    True ends that row with it.

    Raises :class:`DataError` for an empty prompt or an unknown token, :class:`LengthError` where a learned position table is
    too short, and :class:`ConfigError` for a model that cannot be cut in time.
    """
    config = config or GenerationConfig()
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
    check_prompts(model, prompts, prefix)
    require(model, "cut", "generation")
    if config.compile:
        require(model, "compile", "a compiled decode step")
    if len(prompts):
        with evaluating(model):
            yield from _Stream(model, prompts, config, batch_size or len(prompts), prefix, ends).run()


class _Stream:
    """The rows that are running, and the prompts that wait for a place."""

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig, places: int,
        prefix: Prefix | None, ends: Callable[[int, int], bool] | None,
    ) -> None:
        self.model, self.prompts, self.config, self.places, self.prefix = model, prompts, config, places, prefix
        self.ends = ends
        self.waiting = deque(range(len(prompts)))
        self.generators = [torch.Generator().manual_seed(config.seed + row) for row in range(len(prompts))]
        before = () if prefix is None else prefix.tokens
        self.lengths = [len(before) + len(prompt) for prompt in prompts]
        self.seen = Seen(config, [[*before, *map(int, prompt)] for prompt in prompts] if config.repetition_penalty != 1 else [])
        length = needed_length(prompts, config.max_new_tokens, prefix)
        self.max_len = capacity_for(length) if config.compile else length

    def run(self) -> Iterator[GeneratedToken]:
        rows, made = self._take(self.places), dict.fromkeys(range(len(self.prompts)), 0)
        batch = self._start(*self._read(rows))
        while True:
            generators = [self.generators[row] for row in rows]
            tokens, log_probs = choose(batch.scores, self.config, generators, self.seen.of(rows))
            ended = []
            for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
                made[row] += 1
                self.seen.add(row, token)
                told = self.ends is not None and self.ends(row, token)
                ended.append(told or made[row] == self.config.max_new_tokens or token in self.config.stop_tokens)
                yield GeneratedToken(row, token, log_prob, ended[-1])
            kept = [i for i, last in enumerate(ended) if not last]
            fresh = self._take(self.places - len(kept))
            if not kept and not fresh:
                return
            lengths = [self.lengths[rows[i]] + made[rows[i]] for i in kept]
            batch.step(tokens, kept, lengths, self._read(fresh) if fresh else None)
            rows = [rows[i] for i in kept] + fresh

    def _take(self, n: int) -> list[int]:
        return [self.waiting.popleft() for _ in range(min(n, len(self.waiting)))]

    def _read(self, rows: Sequence[int]) -> tuple[Tensor, State]:
        prompts = [self.prompts[row] for row in rows]
        return prefill(self.model, prompts, self.config.prefill_chunk, 0, prefix=self.prefix, max_len=self.max_len)

    def _start(self, scores: Tensor, state: State) -> _EagerRows | CompiledRows:
        if self.config.compile:
            return CompiledRows(self.model, self.config.compile_backend, scores, state)
        return _EagerRows(self.model, scores, state)


class _EagerRows:
    """Scores (b vocab) and state of the running rows; rows that end leave, others come behind the rest."""

    def __init__(self, model: LanguageModel, scores: Tensor, state: State) -> None:
        self.model, self.scores, self.state = model, scores, state

    def step(self, tokens: Tensor, kept: list[int], lengths: list[int], fresh: tuple[Tensor, State] | None) -> None:
        """Rows ``kept`` go on with their ``tokens`` (of all rows so far), to ``lengths``; then ``fresh`` ones join."""
        parts = [] if fresh is None else [fresh]
        if kept:
            if len(kept) < len(tokens):
                self.state = reorder(self.state, torch.tensor(kept))
            parts.insert(0, step(self.model, tokens[kept], self.state))
        self.scores = torch.cat([scores for scores, _ in parts])
        self.state = parts[0][1] if len(parts) == 1 else concat_rows([state for _, state in parts])
