"""Rows put together from pieces: one behind the other, or strewn over a filler.

Axes: b rows, t time, n items, m tokens of an item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtf.tasks.base import IGNORE, NO_EVIDENCE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import Rows


@dataclass(frozen=True)
class Piece:
    """Tokens (b m) of each row, of which the first ``sizes`` (b) count (None: all); ``scored``: they are answers, which the
    row shows at the positions ``shown`` (b m)."""

    tokens: Longs
    sizes: Longs | None = None
    scored: bool = False
    shown: Longs | None = None


def sign(token: int, n_rows: int, *, scored: bool = False) -> Piece:
    """One token that every row has."""
    return Piece(np.full((n_rows, 1), token), None, scored)


def written(pieces: Sequence[Piece], width: int) -> Rows:
    """Rows of ``width`` tokens from pieces one behind the other. The last token of a row is not read, only asked for.

    Rows are as long as their pieces; ``lengths`` is None where no piece has ``sizes``, and then they must fill the width.
    """
    b = len(pieces[0].tokens)
    tokens = np.zeros((b, width + 1), dtype=np.int64)
    scored = np.zeros(tokens.shape, dtype=np.bool_)
    shown = np.full_like(tokens, NO_EVIDENCE)
    end = np.zeros(b, dtype=np.int64)
    for piece in pieces:
        m = piece.tokens.shape[1]
        sizes = np.full(b, m) if piece.sizes is None else piece.sizes
        row, place = np.nonzero(np.arange(m) < sizes[:, None])
        tokens[row, end[row] + place] = piece.tokens[row, place]
        scored[row, end[row] + place] = piece.scored
        if piece.shown is not None:
            shown[row, end[row] + place] = piece.shown[row, place]
        end += sizes
    if all(piece.sizes is None for piece in pieces):
        assert (end == width + 1).all()
        return asked(tokens, scored, shown=shown)
    rows = asked(tokens, scored, shown=shown)
    inputs = np.where(np.arange(width) < (end - 1)[:, None], rows.inputs, 0)  # no answer is left in the padding
    return Rows(inputs, rows.targets, lengths=end - 1, evidence=rows.evidence, answers=rows.answers)


def asked(
    tokens: Longs, scored: NDArray[np.bool_], *, shown: Longs | None = None, answers: Longs | None = None
) -> Rows:
    """Rows (b t) of tokens (b t + 1), of which the ``scored`` ones must be said by what stands before them, and are found at
    the positions ``shown`` (b t + 1); ``answers`` (b t + 1): which answer of the row each is of."""
    evidence = None if shown is None else np.where(scored[:, 1:], shown[:, 1:], NO_EVIDENCE)
    of = None if answers is None else np.where(scored, answers, -1)[:, 1:]
    return Rows(tokens[:, :-1], np.where(scored[:, 1:], tokens[:, 1:], IGNORE), evidence=evidence, answers=of)


def spelled(numbers: Longs, base: int, n_digits: int) -> Longs:
    """(... m) the digits of numbers (...), the highest first."""
    return numbers[..., None] // base ** np.arange(n_digits - 1, -1, -1) % base


def strewn(starts: Draws, n: int, size: int, room: int) -> Longs:
    """(b n) the first tokens of ``n`` items of ``size`` tokens among ``room``, rising; every arrangement is as likely."""
    units = room - n * (size - 1)  # an item is one unit, as a token of the filler is
    return np.sort(starts.distinct(n, units), axis=1) + np.arange(n) * (size - 1)


def shared_out(draws: Draws, n_owners: int, each: int) -> Longs:
    """(b owners each) the places 0, 1, ... of ``n_owners * each`` items, ``each`` for every owner, rising; drawn evenly."""
    order = np.argsort(draws.words(n_owners * each), axis=1, kind="stable")
    return np.sort(order.reshape(len(order), n_owners, each), axis=2)


def put(tokens: Longs, starts: Longs, items: Longs) -> None:
    """Write items (b n m) into rows (b t), each from its place in ``starts`` (b n) on."""
    places = starts[..., None] + np.arange(items.shape[2])
    np.put_along_axis(tokens, places.reshape(len(tokens), -1), items.reshape(len(tokens), -1), axis=1)


def shuffled_words(order: Draws, names: Draws, counts: Longs, n_ids: int) -> tuple[Longs, Longs, Longs]:
    """Words that come ``counts`` (n) times each, in any order: tokens (b t), the words' ids (b n), and where each word came
    first (b n). Ids are different ones below ``n_ids``; ``counts`` are all above 0."""
    total = int(counts.sum())
    at = np.argsort(order.words(total), axis=1, kind="stable")  # where the copies stand, those of the first word in front
    ids = names.distinct(len(counts), n_ids)
    tokens = np.empty((len(at), total), dtype=np.int64)
    np.put_along_axis(tokens, at, np.repeat(ids, counts, axis=1), axis=1)
    return tokens, ids, np.minimum.reduceat(at, np.concatenate([[0], counts.cumsum()[:-1]]), axis=1)


def log2_orders(counts: Longs) -> float:
    """Base-2 logarithm of how many different orders words have that come ``counts`` (n) times each."""
    return (math.lgamma(int(counts.sum()) + 1) - sum(math.lgamma(int(n) + 1) for n in counts)) / math.log(2)
