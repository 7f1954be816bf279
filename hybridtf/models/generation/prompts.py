"""Reading prompts: of unequal lengths, in chunks, after a prefix that was read before.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.core import DataError, Segments, State, StateError, declare, reorder, state_bytes, with_room
from hybridtf.models.generation.model import evaluating, require
from hybridtf.models.language_model import LanguageModel


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that was read once, for any number of continuations: ``generate(model, prompts, prefix=prefix)``.

    ``scores`` (1 vocab) follow its last token. Nothing consumes its ``state`` (one row): every use copies it. It holds as
    long as the model's weights stay what they are.
    """

    model: LanguageModel
    tokens: tuple[int, ...]
    scores: Tensor
    state: State

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the scores."""
        return state_bytes(self.state) + self.scores.numel() * self.scores.element_size()

    def rows(self, n: int, max_len: int) -> tuple[Tensor, State]:
        """``n`` rows of it in memory of their own, with room for ``max_len`` tokens: scores (n vocab) and the state."""
        index = torch.zeros(n, dtype=torch.int64, device=self.scores.device)
        return self.scores[index], with_room(reorder(self.state, index), max_len)


def read_prompt(model: LanguageModel, prompt: Sequence[int], *, prefill_chunk: int = 2048) -> Prefix:
    """Read a prompt and keep what the model knows after it.

    Continuing from it gives what reading the prompt again gives, bit for bit where it is read alone and cut alike.
    """
    check_prompts(model, [prompt])
    require(model, "cut", "generation")
    with evaluating(model), torch.no_grad():
        width = len(prompt)
        scores, state = _read(model, [prompt], prefill_chunk, model.init_state(1), None)
    assert scores is not None
    return Prefix(model, tuple(int(token) for token in prompt[:width]), scores, state)


def check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> None:
    """Raise :class:`DataError` for what is no prompt of this model; empty ones are allowed after a prefix."""
    if prefix is not None and prefix.model is not model:
        raise StateError("the prefix was read by another model")
    vocab = model.config.vocab_size
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence | Tensor) or getattr(prompt, "ndim", 1) == 0:
            raise DataError(f"prompts are sequences of token ids, one each; prompt {row} is of type {type(prompt).__name__}")
        if not len(prompt) and prefix is None:
            raise DataError(f"prompt {row} is empty; give at least one token")
        ids = _token_ids(prompt, row)
        if len(prompt) and bool(((ids < 0) | (ids >= vocab)).any()):
            raise DataError(f"prompt {row} has a token outside of the vocabulary: ids are 0 to {vocab - 1}")


def _token_ids(prompt: Sequence[int], row: int) -> Tensor:
    """(t) of whole numbers; anything else would be cut down to some token without a word."""
    try:
        ids = torch.as_tensor(prompt) if len(prompt) else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.zeros(0)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"prompt {row} is no flat sequence of token ids (whole numbers)")
    return ids


def needed_length(prompts: Sequence[Sequence[int]], room: int, prefix: Prefix | None) -> int:
    """Tokens of the longest row once ``room`` tokens were made."""
    return max((len(prompt) for prompt in prompts), default=0) + room + (0 if prefix is None else len(prefix.tokens))


@torch.no_grad()
def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], chunk: int, room: int, *, prefix: Prefix | None = None,
    max_len: int | None = None,
) -> tuple[Tensor, State]:
    """Read prompts of any lengths, ``chunk`` columns at a time: scores (b vocab) after each one's last token, and the state.

    The state has room for ``room`` more tokens, or ``max_len`` in all. After a ``prefix`` a prompt may be empty. Positions
    that depend on a declared length take the model's ``max_seq_len``: a row must not depend on its batch.
    """
    max_len = needed_length(prompts, room, prefix) if max_len is None else max_len
    if prefix is None:
        state = model.init_state(len(prompts), max_len=max_len)
        declare(state, None)
        scores, state = _read(model, prompts, chunk, state, None)
    else:
        before, state = prefix.rows(len(prompts), max_len)
        scores, state = _read(model, prompts, chunk, state, before)
    assert scores is not None
    return scores, state


def _read(
    model: LanguageModel, prompts: Sequence[Sequence[int]], chunk: int, state: State, scores: Tensor | None
) -> tuple[Tensor | None, State]:
    """Scores after each prompt's last token (what was given, for an empty one), and the state."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    width = int(lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64, device=model.device)
    segments = None
    if int(lengths.min()) < width:
        require(model, "segment", "a batch of prompts of unequal lengths")
        segments = Segments.from_mask(torch.arange(width, device=model.device) < lengths[:, None])
    for start in range(0, width, chunk):
        stop = min(start + chunk, width)
        part = None if segments is None else segments.narrow(start, stop)
        out = model(ids[:, start:stop], segments=part, state=state, logits="last")
        ends_here = ((lengths > start) & (lengths <= stop))[:, None]
        scores = out.logits if scores is None else torch.where(ends_here, out.logits, scores)
        state = out.state
    return scores, state
