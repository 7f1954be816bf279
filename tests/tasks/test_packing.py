import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.draws import hashed, shuffled
from hybridtf.tasks.packing import evaluation_pieces, fill, pack, training_pieces

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=30).map(lambda x: np.array(x, dtype=np.int64))
BOS = 10**6


def numbered(lengths) -> Documents:
    """Documents in which every token is another number, so that it says where it came from; two bytes a token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    raw = np.zeros(2 * offsets[-1], dtype=np.uint8)
    names = tuple(str(i) for i in range(len(lengths)))
    return Documents(names, np.arange(offsets[-1], dtype=np.uint32), offsets, raw, 2 * offsets, "numbered")


def splitmix64(state: int) -> int:
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hash_is_splitmix64_in_integer_arithmetic() -> None:
    # First outputs of the published generator for seed 1234567 (the well-known test vector).
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973
    for key in [(0,), (7, 3, 1), (-5, 2), (2**70, 1)]:
        base = 0
        for word in key:
            base = splitmix64((base + word) % 2**64)
        expected = [splitmix64((base + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(5)]
        assert hashed(key, 5).tolist() == expected


def test_shuffles_are_permutations_that_differ_by_key() -> None:
    orders = [shuffled((seed, epoch), 50).tolist() for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert shuffled((1, 2), 0).tolist() == []


@given(LENGTHS, st.integers(1, 33), st.integers(0, 5))
def test_training_pieces_cover_every_token_once(lengths, seq_len, epoch) -> None:
    pieces = training_pieces(lengths, seq_len, (0, epoch))
    spans = zip(pieces.document, pieces.start, pieces.stop, strict=True)
    seen = sorted((d, i) for d, a, b in spans for i in range(a, b))
    assert seen == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    assert pieces.length.min() >= 1
    assert pieces.length.max() <= seq_len
    for d, n in enumerate(lengths):
        if n <= seq_len:
            assert (pieces.document == d).sum() == 1, "a document that fits was cut"


def test_cuts_of_a_long_document_move_with_the_epoch() -> None:
    cuts = {int(training_pieces(np.array([1000]), 64, (0, epoch)).stop[0]) for epoch in range(40)}
    assert len(cuts) > 20


@given(LENGTHS, st.integers(1, 33), st.data())
def test_windows_score_every_token_once_with_the_promised_context(lengths, seq_len, data) -> None:
    stride = data.draw(st.integers(1, seq_len))
    pieces = evaluation_pieces(lengths, seq_len, stride)
    scored = []
    for d, start, stop, score in zip(pieces.document, pieces.start, pieces.stop, pieces.score, strict=True):
        assert 0 <= start <= score < stop <= lengths[d]
        assert stop - start == min(seq_len, lengths[d])
        assert start == 0 or score - start >= seq_len - stride
        scored += [(d, i) for i in range(score, stop)]
    assert sorted(scored) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    assert len(scored) == len(set(scored))


@given(LENGTHS)
def test_pack_is_best_fit_decreasing(lengths) -> None:
    width = 70
    rows = pack(lengths, width)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= width for row in rows)
    naive: list[int] = []  # room left in each row, searched in full
    for n in sorted(lengths.tolist(), reverse=True):
        fits = [room for room in naive if room >= n]
        if fits:
            naive[naive.index(min(fits))] -= n
        else:
            naive.append(width - n)
    assert sorted(width - sum(lengths[i] for i in row) for row in rows) == sorted(naive)


def test_fill_shifts_by_one_inside_a_document_and_keeps_documents_apart() -> None:
    documents = numbered([3, 5, 1])
    pieces = training_pieces(documents.lengths, 8, (0,))
    batch = fill(documents, pieces, [[0, 1], [2], []], 8, BOS)
    assert batch.inputs.tolist() == [[BOS, 0, 1, BOS, 3, 4, 5, 6], [BOS] + [0] * 7, [0] * 8]
    assert batch.targets.tolist() == [list(range(8)), [8] + [IGNORE] * 7, [IGNORE] * 8]
    assert batch.segments is not None
    assert batch.segments.ids.tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [1] + [0] * 7, [0] * 8]
    assert not batch.segments.continues.any()
    assert (batch.n_tokens, batch.n_bytes) == (9, 18)
    moved = batch.to("cpu")
    assert torch.equal(moved.inputs, batch.inputs)
    assert (moved.n_tokens, moved.n_bytes) == (9, 18)


@pytest.mark.parametrize("stride", [512, 256, 1, 511])
def test_windowed_loss_of_a_known_table_is_the_exact_value(stride: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 7, 2050).astype(np.uint32)
    offsets = np.array([0, 2050])
    documents = Documents(("a",), text, offsets, text.astype(np.uint8), offsets, "x")
    table = -np.log(rng.dirichlet(np.ones(7), size=8))  # row 7: the start of a document
    exact = table[7, text[0]] + sum(table[a, b] for a, b in itertools.pairwise(text))
    pieces = evaluation_pieces(documents.lengths, 512, stride)
    batch = fill(documents, pieces, [[i] for i in range(len(pieces))], 512, 7)
    scored = batch.targets != IGNORE
    nats = torch.from_numpy(table)[batch.inputs[scored], batch.targets[scored]].sum().item()
    assert int(scored.sum()) == batch.n_tokens == batch.n_bytes == 2050
    assert nats == pytest.approx(exact, rel=1e-12)
