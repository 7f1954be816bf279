import math
from collections import Counter

import numpy as np
import pytest

from hybridtf.tasks.bigram import STRENGTHS, bigram, byte_baselines, byte_counts, choose_strength, unigram
from hybridtf.tasks.corpora import Document
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.tokenization import ByteTokenizer

TRAIN = [b"the cat sat on the mat\n", b"a", b"no, the dog did not sit; the dog ran off\n" * 9, "déjà vu".encode()]
HELD = [b"the dog sat\n", b"zebra \xf0\x9f\x98\x80"]


def encode(texts: list[bytes]) -> Documents:
    return Documents.encode([Document(str(i), text) for i, text in enumerate(texts)], ByteTokenizer())


def brute_force(strength: float) -> tuple[float, float]:
    """(unigram, bigram) bits a byte, by one loop over the bytes."""
    single, pairs, contexts = Counter(), Counter(), Counter()
    for text in TRAIN:
        before = -1
        for byte in text:
            single[byte] += 1
            pairs[before, byte] += 1
            contexts[before] += 1
            before = byte
    n = sum(single.values())
    uni = bi = 0.0
    for text in HELD:
        before = -1
        for byte in text:
            p = (single[byte] + 1) / (n + 256)
            uni -= math.log2(p)
            bi -= math.log2((pairs[before, byte] + strength * p) / (contexts[before] + strength))
            before = byte
    size = sum(map(len, HELD))
    return uni / size, bi / size


def test_equals_a_loop_over_the_bytes() -> None:
    train, held = encode(TRAIN), encode(HELD)
    uni, bi = brute_force(choose_strength(train))
    baselines = byte_baselines(train, held)
    assert baselines["uniform"] == 8.0
    assert baselines["unigram"] == pytest.approx(uni, rel=1e-12)
    assert baselines["bigram"] == pytest.approx(bi, rel=1e-12)


def test_counts_start_each_document_anew() -> None:
    counts = byte_counts(encode([b"ab", b"ab", b"b"]))
    assert counts.sum() == 5
    assert counts[256, ord("a")] == 2
    assert counts[256, ord("b")] == 1
    assert counts[ord("a"), ord("b")] == 2
    assert counts[ord("b")].sum() == 0


def test_probabilities_sum_to_one_whatever_was_seen() -> None:
    counts = byte_counts(encode(TRAIN))
    assert unigram(counts).sum() == pytest.approx(1, rel=1e-12)
    for strength in STRENGTHS:
        p = bigram(counts, strength)
        assert p.min() > 0
        np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)


def test_strength_is_chosen_on_training_text_alone() -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(97, 123, 60_000).astype(np.uint8).tobytes()
    alternating = b"ab" * 30_000
    assert choose_strength(encode([noise])) >= 256, "contexts that say nothing want much of the unigram"
    assert choose_strength(encode([alternating])) == STRENGTHS[0]
    assert choose_strength(encode([b"a"])) in STRENGTHS


def test_order_in_text_is_worth_bits() -> None:
    baselines = byte_baselines(encode([b"abcabcabc" * 50]), encode([b"abcabc" * 20]))
    assert baselines["bigram"] < 0.2
    assert baselines["unigram"] == pytest.approx(math.log2((450 + 256) / (150 + 1)), rel=1e-12)
