"""Log-probabilities of continuations, each as its row alone gives them.

A context is read once, however many continuations it has, and what all contexts begin with is read once for all. Scores are
computed at the places that are asked for and nowhere else.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hybridtf.core import DataError, Segments, State, reorder, with_room
from hybridtf.models import LanguageModel
from hybridtf.models.generation import Prefix, prefill, read_prompt
from hybridtf.models.generation.model import evaluating, refusal

Tokens: TypeAlias = tuple[int, ...]
Row: TypeAlias = tuple[Tokens, Tokens]
"""A context of at least one token, and what follows it."""
Score: TypeAlias = tuple[float, bool]
"""The continuation's log-probability in nats, and whether each of its tokens is the likeliest."""

WORTH_KEEPING = 16
"""A common beginning of fewer tokens is read again in each batch."""
LOGITS = 1 << 26
"""Scores (rows, places, vocabulary) that one call may compute; a longer continuation is read in pieces."""
PREFILL = 2048


def score(
    model: LanguageModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_size: int, max_length: int,
    progress: Callable[[int], object] = lambda n: None,
) -> list[Score]:
    """A score for each (context, continuation). Of a row longer than ``max_length`` the beginning is left out."""
    asked = [_fitting(tuple(context), tuple(following), max_length) for context, following in rows]
    waiting: dict[Row, int] = {}
    for row in asked:
        waiting[row] = waiting.get(row, 0) + 1
    found: dict[Row, Score] = {}
    with evaluating(model), torch.no_grad():
        whole = refusal(model, "cut") is not None
        for row, result in (_whole if whole else _shared)(model, list(waiting), batch_size):
            found[row] = result
            progress(waiting[row])
    return [found[row] for row in asked]


def _fitting(context: Tokens, following: Tokens, max_length: int) -> Row:
    if not context or not following:
        raise DataError("a context and a continuation of at least one token each are needed")
    if len(following) > max_length:
        raise DataError(f"a continuation of {len(following)} tokens is longer than max_length = {max_length}")
    room = max_length + 1 - len(following)  # the last token of a row is not read
    return context[-room:], following


def batches(items: Sequence[Tokens], size: int, equal: bool) -> Iterator[list[int]]:
    """Places of ``items`` in batches, longest first; with ``equal`` a batch has items of one length."""
    order = sorted(range(len(items)), key=lambda i: (-len(items[i]), items[i]))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == size or (equal and len(items[batch[0]]) != len(items[i]))):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def common_prefix(model: LanguageModel, rows: Sequence[Tokens]) -> Prefix | None:
    """What all rows begin with, read once; None where that is not worth it."""
    first, last = min(rows), max(rows)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return read_prompt(model, first[:n]) if len(rows) > 1 and n >= WORTH_KEEPING else None


def _shared(model: LanguageModel, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[Row, Score]]:
    following: dict[Tokens, list[Tokens]] = {}
    for context, tokens in rows:
        following.setdefault(context, []).append(tokens)
    equal = refusal(model, "segment") is not None
    prefix = common_prefix(model, list(following))
    known = 0 if prefix is None else len(prefix.tokens)
    contexts = list(following)
    for batch in batches(contexts, batch_size, equal):
        here = [contexts[i] for i in batch]
        room = max(len(tokens) for context in here for tokens in following[context])
        length = max(map(len, here)) + room
        before, state = prefill(model, [c[known:] for c in here], PREFILL, room, prefix=prefix, max_len=length)
        pairs = [(i, tokens) for i, context in enumerate(here) for tokens in following[context]]
        for part in batches([tokens for _, tokens in pairs], batch_size, equal):
            index = torch.tensor([pairs[k][0] for k in part], device=model.device)
            after = [pairs[k][1] for k in part]
            copy = with_room(reorder(state, index), length) if len(after[0]) > 1 else None
            for k, result in zip(part, _continuations(model, after, before[index], copy), strict=True):
                yield (here[pairs[k][0]], pairs[k][1]), result


def _continuations(model: LanguageModel, rows: Sequence[Tokens], before: Tensor, state: State | None) -> list[Score]:
    """``before`` (b vocab) are the scores of each row's first token; the first row is the longest."""
    tally = _Tally(len(rows), model.device)
    tokens, real = _padded(rows, model.device)
    tally.add(before[:, None], tokens[:, :1], real[:, :1])
    columns = max(1, LOGITS // (len(rows) * model.config.vocab_size))
    width = tokens.shape[1] - 1
    for start in range(0, width, columns):
        stop = min(start + columns, width)
        read = real[:, start + 1 : stop + 1]  # the last token of a row is scored, not read
        segments = None if bool(read.all()) else Segments.from_mask(read)
        out = model(tokens[:, start:stop], segments=segments, state=state)
        state = out.state
        tally.add(out.logits, tokens[:, start + 1 : stop + 1], read)
    return tally.scores()


def _whole(model: LanguageModel, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[Row, Score]]:
    """For a model that cannot be cut in time: every row in one call."""
    joined = [context + following for context, following in rows]
    for batch in batches(joined, batch_size, refusal(model, "segment") is not None):
        tokens, real = _padded([joined[i] for i in batch], model.device)
        read = real[:, 1:]
        out = model(tokens[:, :-1], segments=None if bool(read.all()) else Segments.from_mask(read))
        begins = torch.tensor([len(rows[i][0]) for i in batch], device=model.device)
        scored = read & (torch.arange(1, tokens.shape[1], device=model.device) >= begins[:, None])
        tally = _Tally(len(batch), model.device)
        tally.add(out.logits, tokens[:, 1:], scored)
        for i, result in zip(batch, tally.scores(), strict=True):
            yield rows[i], result


def _padded(rows: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """(b t) tokens, zeros behind, and which are real."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(width, device=device) < lengths[:, None]


class _Tally:
    """Sums of log-probabilities, in float32 at least, and whether all was likeliest so far."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.total = torch.zeros(rows, dtype=torch.float64, device=device)
        self.likeliest = torch.ones(rows, dtype=torch.bool, device=device)

    def add(self, logits: Tensor, targets: Tensor, scored: Tensor) -> None:
        """Scores (b t vocab) of ``targets`` (b t), where ``scored`` (b t)."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        picked = wide.gather(2, targets[..., None])[..., 0] - wide.logsumexp(2)
        self.total += torch.where(scored, picked.double(), 0.0).sum(1)
        self.likeliest &= ((logits.argmax(2) == targets) | ~scored).all(1)

    def scores(self) -> list[Score]:
        return list(zip(self.total.tolist(), self.likeliest.tolist(), strict=True))
