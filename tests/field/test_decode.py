"""Decoding and prefill in pieces must give what one forward over the whole input gives."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import RecipeError, Segments, crop, reorder
from hybridtf.testing.compare import close_rows, close_states
from tests.field.layers import F32, F64, chunked, every, hybrid, mixer, pieces, same, solo, steps


@every
@torch.no_grad()
def test_several_tokens_at_once_go_into_a_warm_state(name):
    layer = mixer(name, "cut")
    x = torch.randn(2, 12, 16, dtype=F64)
    want, want_state = solo(layer, x)
    got, state = pieces(layer, x, [5, 4, 3], layer.init_state(2))
    same(got, want)
    close_states(state, want_state, tol=1e-10, what="final state")


@chunked
@pytest.mark.parametrize("chunk_size", [32, 48])
@torch.no_grad()
def test_a_long_input_in_segments_stays_exact_in_every_segment(name, chunk_size):
    """48 does not divide the segments of 64."""
    try:
        layer = mixer(name, "cut", dtype=F32, chunk_size=chunk_size)
    except RecipeError as error:
        pytest.skip(f"refuses the chunk: {error}")
    x = torch.randn(1, 256, 16)
    want, _ = layer(x)[0], None
    got, _ = pieces(layer, x, [64] * 4, layer.init_state(1))
    errors = [float((a - b).abs().max()) for a, b in zip(got.split(64, 1), want.split(64, 1), strict=True)]
    assert max(errors) < 1e-4
    assert errors[3] <= 4 * errors[0] + 1e-5


@chunked
@pytest.mark.parametrize("warm", [False, True])
@torch.no_grad()
def test_chunks_of_64_equal_single_steps_around_every_border(name, warm):
    layer = mixer(name, "cut", chunk_size=64)
    x, before = torch.randn(1, 129, 16, dtype=F64), torch.randn(1, 5, 16, dtype=F64)

    def start():
        return solo(layer, before)[1] if warm else layer.init_state(1)

    lengths, state, stepped = [1, 2, 63, 64, 65, 127, 128, 129], start(), []
    for t in range(129):
        y, state = layer(x[:, t : t + 1], state=state)
        stepped.append(y)
        if t + 1 in lengths:
            got, whole = layer(x[:, : t + 1], state=start())
            same(got, torch.cat(stepped, 1))
            close_states(whole, state, tol=1e-10, what=f"state after {t + 1} tokens")
    assert len(stepped) == lengths[-1]


def _poison() -> None:
    """Leave memory behind that holds NaN, for whoever allocates next."""
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256):
        for dtype in (F32, F64):
            [torch.full((n, 16), float("nan"), dtype=dtype) for _ in range(8)]


@every
@torch.no_grad()
def test_steps_from_two_fresh_states_are_bit_equal(name):
    layer = mixer(name, "cut")
    x = torch.randn(1, 10, 16, dtype=F64)
    runs = []
    for max_len in (None, None, 10, 10):
        _poison()
        runs.append(steps(layer, x, layer.init_state(1, max_len))[0])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])
    same(runs[0], layer(x)[0])
    same(runs[2], layer(x)[0])


@torch.no_grad()
def test_steps_of_a_hybrid_from_two_fresh_states_are_bit_equal():
    net, ids = hybrid(), torch.randint(0, 17, (1, 10))

    def run():
        state, out = net.init_state(1, max_len=10), []
        for t in range(10):
            result = net(ids[:, t : t + 1], state=state)
            state = result.state
            out.append(result.logits)
        return torch.cat(out, 1)

    first = run()
    assert torch.equal(first, run())
    same(first, net(ids).logits)


@chunked
@torch.no_grad()
def test_a_document_that_starts_within_a_chunk_measures_decay_from_its_own_start(name):
    """Lengths 5, 11, 3, 13 over chunks of 8: three of four begin off the grid, each with a state of its own."""
    layer = mixer(name, "segment", "cut", chunk_size=8)
    lengths, firsts = [5, 11, 3, 13], [0, 5, 16, 19]
    before = torch.randn(4, 6, 16, dtype=F64)
    x = torch.randn(1, 32, 16, dtype=F64)
    place = torch.arange(32)
    rows = torch.stack([(place >= f) & (place < f + n) for f, n in zip(firsts, lengths, strict=True)])
    _, state = solo(layer, before)
    y, state = layer(x.expand(4, -1, -1), segments=Segments.from_mask(rows), state=state)
    packed, _ = layer(x, segments=Segments.from_lengths([lengths]))
    for i, (f, n) in enumerate(zip(firsts, lengths, strict=True)):
        alone = solo(layer, before[i : i + 1])[1]
        want, alone = layer(x[:, f : f + n], state=alone)
        same(y[i : i + 1, f : f + n], want)
        close_rows(state, i, alone, 0, tol=1e-10, what=f"document {i}")
        same(packed[:, f : f + n], layer(x[:, f : f + n])[0])


@every
@torch.no_grad()
def test_the_state_after_eight_tokens_of_each_row_is_that_of_the_row_alone(name):
    """Rows of 10, 13 and 18 tokens that go back to their eighth: none but the last lies on the batch's grid of chunks."""
    options = {"chunk_size": 4} if "chunk_size" in type(mixer(name).config).model_fields else {}
    layer = mixer(name, "segment", "crop", **options)
    x, lengths = torch.randn(3, 18, 16, dtype=F64), torch.tensor([10, 13, 18])
    segments = Segments.from_mask(torch.arange(18) < lengths[:, None])
    _, state = layer(x, segments=segments, state=layer.init_state(3), keep=10)
    state = crop(state, lengths - 8)
    for i in range(3):
        _, alone = solo(layer, x[i : i + 1, :8])
        close_rows(state, i, alone, 0, tol=1e-10, what=f"row {i}")
        after, _ = steps(layer, x[i : i + 1, :2], reorder(state, torch.tensor([i])))
        same(after, steps(layer, x[i : i + 1, :2], alone)[0])
