"""``common_words_text`` and ``frequent_words_text``: which words came most often in a list, or in a text? (Hsieh et al.,
*RULER*, https://arxiv.org/abs/2404.06654); ``common_words`` and ``frequent_words`` with a tokenizer.

``common_words_text``: a numbered list in which ``n_words`` words come ``n_common`` times each, others ``n_rare`` times each, in
one random order. The common ones must be said, in the order in which they first came (RULER takes any order; one is needed
where each answer is given on). With the list shortened by "...":

    Below is a numbered list of words. Memorize the ones that appear most often. 1. banilo 2. kutove 3. banilo ... What are the
    2 most common words in the list? They are banilo, sorapi
                                              ------  ------ scored

``frequent_words_text``: a text of words that follow Zipf's law (the word of rank k comes in proportion to k^-alpha, rounded
down, what is left going to the rarest), in one random order; the ``n_words`` most frequent must be said, the first first.

Words are of three syllables, drawn anew for each row, of those that the tokenizer writes with its most usual number of tokens:
so all rows of a size have as many words. ``length`` is the longest row in tokens of the tokenizer. The measure is
``answer_accuracy``: words right as a whole; ``chance`` is any word, ``own`` any that the row has.

Sizes of RULER: 10 words 30 times each, others 3 times; alpha 2, 3 words; 4,096 to 131,072 tokens, 500 rows a length. Presets:
``ruler_common_words_text`` and ``ruler_frequent_words_text`` (16,384 bytes and more), ``common_words_text_small`` and
``frequent_words_text_small``.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from hybridtf.core import ConfigError, Preset
from hybridtf.tasks.common_words import WordRows
from hybridtf.tasks.draws import Draws, Longs, shuffled
from hybridtf.tasks.layout import log2_orders, shuffled_words
from hybridtf.tasks.needles_text import answers_of
from hybridtf.tasks.synthetic import RowsOf, sizes
from hybridtf.tasks.text_rows import N_WORDS, Bank, Plan, TextRowsConfig, Texts, encoder, spell

_ORDER, _NAMES = range(8, 10)
_WORDS, _CANDIDATES = 20240409, 16_384


class WordCountsConfig(TextRowsConfig):
    """Base of the two: a text of words, and a question for those that came most often."""

    @abstractmethod
    def counts(self, size: Any) -> Longs:
        """(n) how often each word comes, those that are asked for first."""

    @abstractmethod
    def said(self, size: Any) -> tuple[str, str, int]:
        """What stands before the words, the question, and how many words it asks for."""

    def numbered(self) -> bool:
        """Words stand in a numbered list."""
        return False

    def answer(self, size: Any, ids: Longs, first: Longs) -> Longs:
        """(b k) the words to say of a row's words (b n), given where each came ``first`` (b n)."""
        return ids[:, : self.said(size)[2]]

    def shared(self, training: bool) -> Bank:
        """The words, then the numbers of a list."""
        return _words(self.tokenizer, self.bos_token, self._longest())

    def n_places(self, size: Any) -> int:
        """Words that a row of ``size`` has room for."""
        bank = self.shared(training=True)
        word = int(bank.sizes[0])
        head, question, k = self.said(size)
        said = [text.encode() for text in (",", head, question)]
        comma, *ends = (int(ids.size) for ids in encoder(self.tokenizer, self.bos_token).encode(said))
        room = size.length - sum(ends) - k * word - (k - 1) * comma
        if not self.numbered():
            return int(max(room // word, 0))
        return int(np.searchsorted(np.cumsum(bank.sizes[self.n_different() :] + word), room, side="right"))

    def n_different(self) -> int:
        """Words to draw from."""
        return self.shared(training=True).n - _n_numbers(self._longest())

    def _longest(self) -> int:
        """Tokens of the longest numbered row; 0 where words have no numbers."""
        return max(size.length for size in (*self.train, *self.test)) if self.numbered() else 0

    def bits(self, size: Any) -> float:
        return log2_orders(self.counts(size))

    def plan(self, size: Any, key: tuple[int, ...], index: Longs, texts: Texts) -> Plan:
        b, counts = len(index), self.counts(size)
        key = (*key, size.length, len(counts), int(counts[0]))
        if len(counts) > self.n_different():
            raise ConfigError(
                f"task {self.type_name()!r}, {size.name}: rows have {len(counts)} different words, of {self.n_different()}"
            )
        order, names = Draws((*key, _ORDER), index), Draws((*key, _NAMES), index)
        words, ids, first = shuffled_words(order, names, counts, self.n_different())
        if self.numbered():
            numbers = np.broadcast_to(self.n_different() + np.arange(words.shape[1]), words.shape)
            words = np.stack([numbers, words], axis=2).reshape(b, -1)
        before, question, k = self.said(size)
        head = np.concatenate([texts.column(before, b), words], axis=1)
        tail = np.empty((b, 2 * k), dtype=np.int64)
        tail[:, :1], tail[:, 2::2] = texts.column(question, b), texts.number(",")
        tail[:, 1::2] = self.answer(size, ids, first)
        none = np.zeros((b, 0), dtype=np.int64)
        return Plan(head, none, none.astype(np.float64), tail, np.tile(answers_of(k), (b, 1)))

    def baselines(self) -> dict[str, float]:
        """``chance``: any word; ``own``: any that the row has."""
        weights = [size.n_rows * self.said(size)[2] for size in self.test]
        own = sum(w / len(self.counts(size)) for w, size in zip(weights, self.test, strict=True)) / sum(weights)
        return {"chance": 1 / self.n_different(), "own": own}


class CommonWordsTextConfig(WordCountsConfig):
    """Say the words that came often in a numbered list."""

    type: Literal["common_words_text"] = "common_words_text"
    train: tuple[WordRows, ...] = (WordRows(length=16_384, n_rows=20_000),)
    test: tuple[WordRows, ...] = (WordRows(length=16_384, n_rows=500),)

    @classmethod
    def tiny(cls) -> Self:
        rows = WordRows(length=400, n_words=2, n_common=5, n_rare=1, n_rows=40)
        return cls(train=(rows,), test=(rows, WordRows(length=440, n_words=2, n_common=5, n_rare=2, n_rows=5)))

    def numbered(self) -> bool:
        return True

    def counts(self, size: WordRows) -> Longs:
        left = self.n_places(size) - size.n_words * size.n_common
        if left <= 0:
            raise ConfigError(f"task 'common_words_text': {size.name}: the common words alone do not fit; use longer rows")
        rare = [size.n_rare] * (left // size.n_rare) + [left % size.n_rare] * (left % size.n_rare > 0)
        return np.array([size.n_common] * size.n_words + rare)

    def said(self, size: WordRows) -> tuple[str, str, int]:
        question = _question(size.n_words, "common", "list")
        return "Below is a numbered list of words. Memorize the ones that appear most often.\n", question, size.n_words

    def answer(self, size: WordRows, ids: Longs, first: Longs) -> Longs:
        turn = np.argsort(first[:, : size.n_words], axis=1)
        return np.take_along_axis(ids, turn, axis=1)


class FrequentWordsTextConfig(WordCountsConfig):
    """Say the most frequent words of a text, the first first."""

    type: Literal["frequent_words_text"] = "frequent_words_text"
    n_words: int = Field(default=3, gt=0)
    """Words that are asked for."""
    alpha: float = Field(default=2.0, gt=0, examples=[1.5])
    train: tuple[RowsOf, ...] = (RowsOf(length=16_384, n_rows=20_000),)
    test: tuple[RowsOf, ...] = (RowsOf(length=16_384, n_rows=500),)

    @classmethod
    def tiny(cls) -> Self:
        return cls(train=(RowsOf(length=700, n_rows=40),), test=(RowsOf(length=700, n_rows=8), RowsOf(length=900, n_rows=5)))

    def counts(self, size: RowsOf) -> Longs:
        room = self.n_places(size)
        share = np.arange(1, min(room, 4096) + 1, dtype=np.float64) ** -self.alpha
        counts = np.floor(room * share / share.sum()).astype(np.int64)
        rarest = np.arange(len(counts)) >= len(counts) - (room - counts.sum())
        counts = counts + rarest
        found = np.asarray(counts[counts > 0])
        top = found[: self.n_words + 1]
        if len(top) <= self.n_words or (np.diff(top) >= 0).any():
            raise ConfigError(
                f"task 'frequent_words_text': {size.name}: the most frequent words come {top.tolist()} times, which does not "
                f"tell {self.n_words} of them apart; use longer rows or another alpha"
            )
        return found

    def said(self, size: RowsOf) -> tuple[str, str, int]:
        question = _question(self.n_words, "frequent", "text")
        return "Read the following text and track how often each word appears.\n", question, self.n_words


def _question(n: int, often: str, place: str) -> str:
    if n == 1:
        return f"\nWhat is the most {often} word in the {place}? It is"
    return f"\nWhat are the {n} most {often} words in the {place}? They are"


@cache
def _words(tokenizer: str, bos_token: str | None, longest: int) -> Bank:
    """Words behind a space, all of as many tokens, then " 1.", " 2.", ... as many as a row of ``longest`` tokens can hold."""
    found = encoder(tokenizer, bos_token)
    words = [f" {spell(int(i))}" for i in shuffled((_WORDS,), N_WORDS)[:_CANDIDATES]]
    sizes_ = Bank.of(found, words).sizes
    usual = np.bincount(sizes_).argmax()
    kept = [word for word, size in zip(words, sizes_.tolist(), strict=True) if size == usual]
    return Bank.of(found, [*kept, *(f" {i + 1}." for i in range(_n_numbers(longest)))])


def _n_numbers(longest: int) -> int:
    return longest // 2  # a number and a word take two tokens at least


_SIZE = ("length", "n_words", "n_common", "n_rare", "n_rows")

PRESETS = (
    Preset("ruler_common_words_text", "common_words_text", {
        "train": sizes(_SIZE, (16_384, 10, 30, 3, 20_000)),
        "test": sizes(_SIZE, (16_384, 10, 30, 3, 500), (32_768, 10, 30, 3, 200), (65_536, 10, 30, 3, 100)),
    }),
    Preset("common_words_text_small", "common_words_text", {
        "train": sizes(_SIZE, (512, 2, 8, 1, 20_000)), "test": sizes(_SIZE, (512, 2, 8, 1, 256), (1024, 2, 16, 2, 128)),
    }),
    Preset("ruler_frequent_words_text", "frequent_words_text", {
        "train": sizes(("length", "n_rows"), (16_384, 20_000)),
        "test": sizes(("length", "n_rows"), (16_384, 500), (32_768, 200), (65_536, 100)),
    }),
    Preset("frequent_words_text_small", "frequent_words_text", {
        "n_words": 2, "train": sizes(("length", "n_rows"), (512, 20_000)),
        "test": sizes(("length", "n_rows"), (512, 256), (1024, 128), (2048, 64)),
    }),
)
