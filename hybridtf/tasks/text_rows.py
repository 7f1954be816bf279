"""Rows of text, put together from pieces: filler with sentences strewn in, a question, answers that are scored.

Each piece (a sentence, a name, an answer) is encoded on its own and the ids stand one behind the other, so that a row of a
million tokens costs what its few pieces of its own cost, and where an answer begins is never in doubt. Axes: b rows, n pieces,
t time.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hybridtf.core import ConfigError
from hybridtf.tasks.base import IGNORE, NO_EVIDENCE, Totals
from hybridtf.tasks.corpora import load_source, split
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import TRAIN, Rows, SyntheticConfig, SyntheticTask
from hybridtf.tasks.tokenization import Tokenizer, make_tokenizer

Haystack: TypeAlias = Literal["repeated", "corpus"]

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""The filler of the passkey test and of RULER's first needle (https://arxiv.org/abs/2305.16300)."""
_LONGEST_SENTENCE = 300
"""Characters: longer ones are tables and lists more often than prose."""
_PROBED = 2**18
"""Tokens of a size that are drawn when a task is loaded, to see that rows fit."""

# What a draw is for; tasks number their own from 8 on.
_START, _DEPTHS = range(2)


@dataclass(frozen=True)
class Bank:
    """Encoded texts: text i has the ids ``flat[starts[i] : starts[i] + sizes[i]]``."""

    flat: Longs
    starts: Longs
    sizes: Longs

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Sequence[str]) -> Bank:
        """The texts, in their order."""
        ids = tokenizer.encode([text.encode() for text in texts]) if texts else []
        sizes = np.array([len(i) for i in ids], dtype=np.int64)
        flat = np.concatenate(ids).astype(np.int64) if ids else np.zeros(0, dtype=np.int64)
        return cls(flat, np.cumsum(sizes) - sizes, sizes)

    @property
    def n(self) -> int:
        return len(self.sizes)

    def fits(self, first: Longs, room: Longs) -> Longs:
        """(b) how many texts, from number ``first`` (b) on and from the end to the beginning, take at most ``room`` (b)."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        target = ends[first] + room
        laps, rest = target // ends[-1], target % ends[-1]
        return np.asarray(laps * self.n + np.searchsorted(ends, rest, side="right") - 1 - first)


@dataclass
class Texts:
    """The texts of one call, each with a number behind those of a bank that all calls share."""

    shared: Bank
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, self.shared.n + len(self.numbers))

    def column(self, text: str, b: int) -> Longs:
        """(b 1) the same text in all rows."""
        return np.full((b, 1), self.number(text))

    def table(self, rows: Iterable[Iterable[str]]) -> Longs:
        """(b n) numbers of texts."""
        return np.array([[self.number(text) for text in row] for row in rows], dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """Numbers of a row's pieces: ``head`` (b h); ``strewn`` (b m), which lie in filler at the shares ``depths`` (b m), rising;
    ``tail`` (b k), of which ``answers`` (b k) says which answer each piece is of (-1: none, not scored). ``shown`` (b k): which
    of the strewn pieces shows an answer (-1: of no answer); None: no one piece does."""

    head: Longs
    strewn: Longs
    depths: NDArray[np.float64]
    tail: Longs
    answers: Longs
    shown: Longs | None = None


class TextRowsConfig(SyntheticConfig):
    """Base of tasks of rows of text: declare ``plan`` and ``shared``, and what :class:`SyntheticConfig` asks for.

    ``tokenizer`` and ``bos_token`` are those of the task ``text``.
    """

    tokenizer: str = Field(default="bytes", min_length=1)
    bos_token: str | None = None
    train_on: Literal["answers", "all"] = "answers"
    """``all``: training rows have every next token as a target. Held-out rows score answers alone."""

    @abstractmethod
    def shared(self, training: bool) -> Bank:
        """Texts that all rows of a side share, known by their numbers."""

    @abstractmethod
    def plan(self, size: Any, key: tuple[int, ...], index: Longs, texts: Texts) -> Plan:
        """The pieces of the rows ``index`` (b); numbers are from ``texts``."""

    def _tokenizer(self) -> Tokenizer:
        if self.bos_token is not None and self.tokenizer == "bytes":
            raise ConfigError("task.bos_token belongs to a tokenizer file; tokenizer = \"bytes\" has id 256")
        return encoder(self.tokenizer, self.bos_token)

    @property
    def n_ids(self) -> int:
        return self._tokenizer().vocab_size

    def draw(self, size: Any, key: tuple[int, ...], index: Longs) -> Rows:
        shared, training = self.shared(key[0] == TRAIN), key[0] == TRAIN
        texts = Texts(shared)
        plan = self.plan(size, key, index, texts)
        bank = _Both(shared, Bank.of(self._tokenizer(), list(texts.numbers)))
        fixed = sum(bank.sizes[part].sum(1) for part in (plan.head, plan.strewn, plan.tail))
        room = size.length - fixed  # the first id takes one token, and the last answer's last token is not read
        if (room < 0).any():
            raise ConfigError(
                f"task {self.type_name()!r}, {size.name}: all but the filler takes {size.length - int(room.min())} tokens; use "
                "longer rows"
            )
        body = self._body(shared, plan, room, Draws((*key, size.length, _START), index))
        pieces = np.concatenate([plan.head, body, plan.tail], axis=1)
        before = np.full((len(pieces), pieces.shape[1] - plan.tail.shape[1]), -1)
        scored = np.concatenate([before, plan.answers], axis=1)
        shown = None if plan.shown is None else np.concatenate([before, _shown(bank, plan, pieces, shared.n)], axis=1)
        return self._rows(bank, pieces, scored, shown, size.length, all_tokens=training and self.train_on == "all")

    def _body(self, shared: Bank, plan: Plan, room: Longs, start: Draws) -> Longs:
        """(b n) what stands between head and tail, -1 for no piece; ``room`` (b) tokens are free for filler."""
        return plan.strewn

    def _rows(
        self, bank: _Both, pieces: Longs, answers: Longs, shown: Longs | None, length: int, *, all_tokens: bool
    ) -> Rows:
        """Rows of ``length`` tokens from numbers of pieces (b n; -1: none), the answers (b n) that they are of, and where their
        first tokens are ``shown`` (b n)."""
        b = len(pieces)
        sizes = np.where(pieces >= 0, bank.sizes[pieces], 0)
        per_row = sizes.sum(1)
        flat_sizes = sizes.reshape(-1)
        piece, owner = np.repeat(pieces.reshape(-1), flat_sizes), np.repeat(answers.reshape(-1), flat_sizes)
        within = np.arange(len(piece)) - np.repeat(np.cumsum(flat_sizes) - flat_sizes, flat_sizes)
        row = np.repeat(np.arange(b), per_row)
        column = 1 + np.arange(len(piece)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        tokens = np.zeros((b, length + 1), dtype=np.int64)
        asked = np.full((b, length + 1), -1)
        tokens[:, 0] = self._tokenizer().bos_id
        tokens[row, column], asked[row, column] = bank.ids(piece, within), owner
        evidence = None
        if shown is not None:
            begin = np.repeat(shown.reshape(-1), flat_sizes)
            evidence = np.full((b, length + 1), NO_EVIDENCE)
            evidence[row, column] = np.where(begin >= 0, begin + within, NO_EVIDENCE)
            evidence = evidence[:, 1:]
        inside = np.arange(length) < per_row[:, None]  # the first id, and all but a row's last
        targets = np.where(asked[:, 1:] >= 0, tokens[:, 1:], IGNORE)
        if all_tokens:
            targets = np.where(inside, tokens[:, 1:], IGNORE)
            asked = np.zeros_like(asked)
        inputs = np.where(inside, tokens[:, :-1], 0)
        return Rows(inputs, targets, lengths=per_row, evidence=evidence, answers=asked[:, 1:])

    def load(self, seed: int = 0) -> TextRowsTask:
        """Raises :class:`ConfigError` where rows do not fit, or the tokenizer does not give back what pieces spell."""
        check_pieces(self._tokenizer())
        for side, sizes in ((TRAIN, self.train), (1 - TRAIN, self.test)):
            for size in sizes:
                self.draw(size, (side,), np.arange(min(size.n_rows, max(_PROBED // size.length, 1), 32)))
        return TextRowsTask(self, seed)


class HaystackConfig(TextRowsConfig):
    """Base of tasks of sentences that lie in filler.

    ``haystack``: the same five sentences again and again, or sentences of a corpus one after the other, of which some documents
    are kept for held-out rows; ``source`` and ``glob`` are those of the task ``text``.
    """

    haystack: Haystack = "repeated"
    source: str | tuple[str, ...] = Field(default="auto", min_length=1)
    glob: str = Field(default="**/*.txt", min_length=1)

    def shared(self, training: bool) -> Bank:
        source = self.source if self.haystack == "corpus" else None
        return _sentences(self.tokenizer, self.bos_token, source, self.glob, training)

    def depths(self, key: tuple[int, ...], index: Longs, n: int) -> NDArray[np.float64]:
        """(b n) shares of the filler, drawn evenly, rising."""
        return np.sort(Draws((*key, _DEPTHS), index).uniform(n), axis=1)

    def _body(self, shared: Bank, plan: Plan, room: Longs, start: Draws) -> Longs:
        """Filler with the strewn pieces in it."""
        b, m = plan.strewn.shape
        first = start.integers(1, shared.n)[:, 0] if self.haystack == "corpus" else np.zeros(b, dtype=np.int64)
        n = shared.fits(first, room)
        at = np.minimum((plan.depths * (n + 1)[:, None]).astype(np.int64), n[:, None]) + np.arange(m)
        width = int(n.max()) + m
        strewn = np.zeros((b, width), dtype=np.bool_)
        np.put_along_axis(strewn, at, True, axis=1)
        order = np.cumsum(~strewn, axis=1) - 1
        body = np.where(order < n[:, None], (first[:, None] + order) % shared.n, -1)
        np.put_along_axis(body, at, plan.strewn, axis=1)
        return body


class TextRowsTask(SyntheticTask):
    """Compared by the share of answers that are right as a whole, each said after the right ones before it: what RULER's
    ``string_match_all`` is of generated text. ``row_accuracy`` asks for all answers of a row."""

    metric: ClassVar[str] = "answer_accuracy"

    def metrics(self, totals: Totals) -> dict[str, float]:
        return {"answer_accuracy": totals.answer_accuracy, **super().metrics(totals)}


class _Both:
    """The texts that all rows share, then those of one call."""

    def __init__(self, shared: Bank, own: Bank) -> None:
        self._shared, self._own = shared, own
        self.sizes = np.concatenate([shared.sizes, own.sizes])
        self._starts = np.concatenate([shared.starts, own.starts])

    def ids(self, piece: Longs, within: Longs) -> Longs:
        """(n) the token number ``within`` of each piece (n)."""
        at = self._starts[piece] + within
        mine = piece >= self._shared.n
        out = np.empty(len(piece), dtype=np.int64)
        out[mine], out[~mine] = self._own.flat[at[mine]], self._shared.flat[at[~mine]]
        return out

    def find(self, whole: int, part: int) -> int:
        """Where the tokens of text ``part`` stand in those of text ``whole``, the last time; -1: nowhere."""
        ids, wanted = (self.ids(np.full(self.sizes[text], text), np.arange(self.sizes[text])) for text in (whole, part))
        if len(wanted) > len(ids):
            return -1
        found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(ids, len(wanted)) == wanted).all(1))
        return int(found[-1]) if len(found) else -1


def _shown(bank: _Both, plan: Plan, pieces: Longs, n_shared: int) -> Longs:
    """(b k) the position of the first token of each of the tail's answers where a strewn piece shows it, the last time if it
    does so twice; :data:`NO_EVIDENCE` of others, and where the tokenizer cuts it otherwise there.

    ``pieces`` (b n) of whole rows; filler has numbers below ``n_shared``, strewn pieces do not.
    """
    assert plan.shown is not None
    sizes = np.where(pieces >= 0, bank.sizes[pieces], 0)
    begins = np.cumsum(sizes, axis=1) - sizes + 1
    body = slice(plan.head.shape[1], pieces.shape[1] - plan.tail.shape[1])
    strewn = begins[:, body][pieces[:, body] >= n_shared].reshape(plan.strewn.shape)  # in their order
    row, column = np.nonzero(plan.shown >= 0)
    which = plan.shown[row, column]
    pairs, back = np.unique(np.stack([plan.strewn[row, which], plan.tail[row, column]]), axis=1, return_inverse=True)
    offsets = np.array([bank.find(sentence, answer) for sentence, answer in pairs.T.tolist()], dtype=np.int64)[back.reshape(-1)]
    out = np.full_like(plan.tail, NO_EVIDENCE)
    out[row, column] = np.where(offsets >= 0, strewn[row, which] + offsets, NO_EVIDENCE)
    return out


@cache
def encoder(name: str, bos_token: str | None) -> Tokenizer:
    """The tokenizer, read once."""
    return make_tokenizer(name, bos_token)


@cache
def _sentences(
    name: str, bos_token: str | None, source: str | tuple[str, ...] | None, glob: str, training: bool
) -> Bank:
    """The sentences of the filler, each behind a space; ``source`` None: the five of the passkey test."""
    tokenizer = encoder(name, bos_token)
    if source is None:
        return Bank.of(tokenizer, [f" {text}" for text in NOISE])
    train, held_out, _ = split(load_source(source, glob)[1], 0.1, 0)
    documents = train if training else held_out
    found = [text for document in documents for text in sentences(document.data.decode())]
    if not found:
        raise ConfigError(f"source = {source!r}: no sentence of up to {_LONGEST_SENTENCE} characters is in it")
    return Bank.of(tokenizer, [f" {text}" for text in found])


def sentences(text: str) -> list[str]:
    """The sentences of a text, on one line each; those that are long are left out."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [part for part in parts if part[-1:] in (".", "!", "?") and 10 <= len(part) <= _LONGEST_SENTENCE]


def check_pieces(tokenizer: Tokenizer) -> None:
    """Raise :class:`ConfigError` where ids of pieces, one behind the other, do not spell the pieces' text."""
    pieces = ["A line.\n", " One of two: banilo", " is", " 40713.", " Q?", " 7", ",", " 19"]
    ids = [i for part in tokenizer.encode([piece.encode() for piece in pieces]) for i in part.tolist()]
    if (found := tokenizer.decode(ids)) != "".join(pieces):
        raise ConfigError(
            f"tokenizer {tokenizer.name!r}: rows are put together from pieces, and it gives {found!r} for {''.join(pieces)!r}; "
            "use one that keeps every character, such as a byte-level one"
        )


# -- names -------------------------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["words", "numbers", "uuids"]
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
N_WORDS = len(_SYLLABLES) ** 3
"""Words that can be spelled."""


def spell(number: int) -> str:
    """A word of three syllables that can be said, one for each number below :data:`N_WORDS`."""
    high, low = divmod(number, len(_SYLLABLES))
    return _SYLLABLES[high // len(_SYLLABLES)] + _SYLLABLES[high % len(_SYLLABLES)] + _SYLLABLES[low]


def names(kind: Kind, draws: Draws, n: int, n_digits: int) -> list[list[str]]:
    """(b n) different names a row: words, numbers of ``n_digits`` digits, or 32 hexadecimal digits in five groups."""
    if kind == "words":
        return [[spell(i) for i in row] for row in draws.distinct(n, N_WORDS).tolist()]
    if kind == "numbers":
        lowest = 10 ** (n_digits - 1)
        return [[str(lowest + i) for i in row] for row in draws.distinct(n, 9 * lowest).tolist()]
    digits = draws.integers(32 * n, 16).reshape(-1, n, 32).tolist()
    found = [["".join(f"{d:x}" for d in name) for name in row] for row in digits]
    return [["-".join((s[:8], s[8:12], s[12:16], s[16:20], s[20:])) for s in row] for row in found]


def n_names(kind: Kind, n_digits: int) -> float:
    """How many different names there are."""
    return {"words": float(N_WORDS), "numbers": float(9 * 10 ** (n_digits - 1)), "uuids": 16.0**32}[kind]
