"""Byte models that need no training loop: what a neural model of text must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridtf.tasks.documents import Documents

_START = 256
STRENGTHS = tuple(2.0**i for i in range(-4, 13))
"""Weights of the unigram, in observed bytes, among which the bigram's is chosen."""


def byte_counts(documents: Documents, part: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """(257, 256) how often each byte follows each byte; row 256: the start of a document. ``part`` selects bytes."""
    context = np.empty(len(documents.raw), dtype=np.int32)
    context[1:] = documents.raw[:-1]
    context[documents.raw_offsets[:-1]] = _START
    pair = context * np.int32(256) + documents.raw
    if part is not None:
        pair = pair[part]
    return np.bincount(pair, minlength=257 * 256).reshape(257, 256)


def unigram(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(256) probability of each byte, one added to every count."""
    total = counts.sum(0) + 1.0
    return np.asarray(total / total.sum())


def bigram(counts: NDArray[np.int64], strength: float) -> NDArray[np.float64]:
    """(257, 256) probability of each byte after each: counts to which ``strength`` times the unigram is added.

    A Dirichlet prior (MacKay and Peto 1995): the less a context was seen, the more the unigram counts.
    """
    prior = strength * unigram(counts)
    return np.asarray((counts + prior) / (counts.sum(1, keepdims=True) + strength))


def bits(counts: NDArray[np.int64], probability: NDArray[np.float64]) -> float:
    """Bits that ``probability`` (257, 256 or 256) needs for bytes with these counts."""
    return float(-(counts * np.log2(probability)).sum())


def choose_strength(train: Documents) -> float:
    """The strength that is best on every tenth block of 4096 training bytes, fitted on the others."""
    block = np.arange(len(train.raw)) // 4096
    size = int(block[-1]) + 1 if len(block) else 0
    part = block % 10 == 9 if size >= 10 else np.arange(len(train.raw)) % 10 == 9
    tuning, fitting = byte_counts(train, part), byte_counts(train, ~part)
    return min(STRENGTHS, key=lambda strength: bits(tuning, bigram(fitting, strength)))


def byte_baselines(train: Documents, held_out: Documents) -> dict[str, float]:
    """Bits a byte on the held-out documents of the uniform, unigram and bigram model of the training documents."""
    counts, seen, n = byte_counts(train), byte_counts(held_out), len(held_out.raw)
    strength = choose_strength(train)
    return {
        "uniform": 8.0,
        "unigram": bits(seen, unigram(counts)) / n,
        "bigram": bits(seen, bigram(counts, strength)) / n,
    }
