"""The laws of ``ssd``: documents alone, cuts anywhere, pads of any content, and parts combined over ranks."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.ssd import ssd_chunked, ssd_combine, ssd_reference, ssd_summary
from tests.ops.recurrence_cases import (
    assert_same,
    call,
    check_content_of_pads,
    check_cuts,
    check_packed,
    check_rows_of_pads,
    run_in_parts,
)
from tests.ops.ssd_cases import Inputs, inputs, random_segments

OPS = [ssd_reference, ssd_chunked]


def alone(x: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """Every document of every row through the plain recurrence by itself, and the state of each row's last one."""
    y, states = torch.zeros_like(x.v), []
    for row in range(len(x.v)):
        state = x.initial_state[row : row + 1]
        ids = segments.ids[row]
        for i, doc in enumerate(sorted(set(ids.tolist()) - {0})):
            at = (ids == doc).nonzero()[:, 0]
            first = state if i == 0 and segments.continues[row] else None
            part, state = ssd_reference(*(z[row : row + 1, at] for z in x[:4]), initial_state=first)
            y = y.index_put((torch.tensor(row), at), part[0])
        states.append(state[0])
    return y, torch.stack(states)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(4))
def test_each_document_as_if_alone(op, seed: int) -> None:
    x, segments = inputs(seed, 5, 41, h=2), random_segments(seed, 5, 41)
    assert_same(x, call(op, x, segments=segments, chunk_size=8), alone(x, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[5, 11, 3, 13], [5, 1, 9, 3], [0, 1, 0, 1], [3, 0, 4], [0, 0], []])
@pytest.mark.parametrize("continues", [False, True])
def test_packed_documents_some_empty(op, lengths: list[int], continues: bool) -> None:
    check_packed(op, inputs(1, 1, sum(lengths)), lengths, continues, alone)


def test_documents_in_rows_with_their_own_states() -> None:
    lengths = [5, 11, 3, 13]
    x = inputs(7, 4, 13)
    segments = Segments.from_lengths([[n] for n in lengths], continues=True)
    y, state = call(ssd_chunked, x, segments=segments, chunk_size=8)
    for row, n in enumerate(lengths):
        own, last = ssd_reference(
            *(z[row : row + 1, :n] for z in x[:4]), initial_state=x.initial_state[row : row + 1]
        )
        torch.testing.assert_close(y[row : row + 1, :n], own, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state[row : row + 1], last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 9])
def test_rows_of_pads_leave_the_state_untouched(op, t: int) -> None:
    check_rows_of_pads(op, inputs(3, 2, t), t)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 11, 40])
@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_content_of_pads_and_of_dropped_states_has_no_effect(op, t: int, garbage: float) -> None:
    x, segments = inputs(5, 8, t, dtype=torch.float32), random_segments(5, 8, t)
    check_content_of_pads(op, x, segments, range(4), [garbage] * 3 + [-garbage])


def test_a_mask_keeps_the_decay_of_pads_out() -> None:
    x = inputs(6, 1, 11, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]])
    y, state = ssd_chunked(*x[:4], segments=Segments.from_mask(mask), chunk_size=4)
    own, last = ssd_chunked(*(z[:, mask[0] > 0] for z in x[:4]), chunk_size=4)
    torch.testing.assert_close(y[:, mask[0] > 0], own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_decoding_goes_on_from_a_padded_prefill() -> None:
    x = inputs(6, 2, 15)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    _, state = ssd_chunked(*(z[:, :12] for z in x[:4]), segments=Segments.from_mask(mask), chunk_size=8)
    _, short = ssd_chunked(*(z[:1, :7] for z in x[:4]), chunk_size=8)
    for i in range(12, 15):
        y, state = ssd_chunked(*(z[:, i : i + 1] for z in x[:4]), initial_state=state)
        own, short = ssd_chunked(*(z[:1, i : i + 1] for z in x[:4]), initial_state=short)
        torch.testing.assert_close(y[:1], own, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_cut_law(op, packed: bool) -> None:
    x, segments = inputs(9, 3, 96), random_segments(9, 3, 96) if packed else None
    check_cuts(op, x, segments, range(4), 20 if op is ssd_chunked else 4)


@pytest.mark.parametrize("chunk_size", [32, 48])
def test_long_input_streamed_in_float32(chunk_size: int) -> None:
    x = inputs(2, 1, 256, n=8, p=8, dtype=torch.float32, decay=0.1)
    whole, _ = ssd_chunked(*x[:4], chunk_size=chunk_size)
    fresh = x._replace(initial_state=torch.zeros(1, 2, 8, 8))
    parts, _ = run_in_parts(ssd_chunked, fresh, [64, 128, 192], None, chunk_size, range(4))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    again, _ = run_in_parts(ssd_chunked, fresh, [64, 128, 192], None, chunk_size, range(4))
    assert torch.equal(parts, again)


def test_one_token_at_a_time_with_segments() -> None:
    x, segments = inputs(4, 4, 12), random_segments(4, 4, 12)
    parts = run_in_parts(ssd_chunked, x, list(range(1, 12)), segments, 64, range(4))
    assert_same(x, parts, call(ssd_reference, x, segments=segments))


def test_causal_law() -> None:
    x = inputs(4, 1, 40)
    y, _ = call(ssd_chunked, x, chunk_size=16)
    later = torch.autograd.grad(y[:, :17].square().sum(), x[:4])
    assert all(not g[:, 17:].any() for g in later)


@pytest.mark.parametrize("seed", range(4))
def test_combined_summaries_equal_the_whole(seed: int) -> None:
    segments = None if seed == 0 else random_segments(seed, 3, 50)
    x = inputs(seed, 3, 50, g=2, h=4)
    _, last = call(ssd_reference, x, segments=segments)
    bounds = [0, 0, 7, 8, 30, 50]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        part = None if segments is None else segments.narrow(start, stop)
        parts.append(ssd_summary(*(z[:, start:stop] for z in x[1:4]), segments=part))
    left = reduce(ssd_combine, parts)
    right = reduce(lambda later, earlier: ssd_combine(earlier, later), reversed(parts))
    whole = ssd_summary(*x[1:4], segments=segments)
    for a, b, c in zip(left, right, whole, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b, c, rtol=1e-10, atol=1e-10)
    state = left[0][..., None, None] * x.initial_state + left[1]
    zero = torch.zeros_like(x.v)
    assert_same(x, (zero, state), (zero, last))


def test_ranks_start_from_combined_summaries() -> None:
    x, segments = inputs(11, 3, 60), random_segments(11, 3, 60)
    whole, _ = call(ssd_chunked, x, segments=segments)
    decay, state = torch.ones(3, 2, dtype=torch.float64), torch.zeros_like(x.initial_state)
    for start in range(0, 60, 15):
        part, given = segments.narrow(start, start + 15), decay[..., None, None] * x.initial_state + state
        y, _ = ssd_chunked(*(z[:, start : start + 15] for z in x[:4]), initial_state=given, segments=part)
        torch.testing.assert_close(y, whole[:, start : start + 15], rtol=1e-10, atol=1e-10)
        own = ssd_summary(*(z[:, start : start + 15] for z in x[1:4]), segments=part)
        decay, state = ssd_combine((decay, state), own)


def test_summary_refuses_wrong_shapes_and_bounds_log_zero() -> None:
    x = inputs(0, 2, 9)
    with pytest.raises(ConfigError, match="log_a must be"):
        ssd_summary(x.k, x.v, x.log_a[:, :-1])
    never = x.log_a.detach().clone()
    never[:, 4] = -torch.inf
    decay, state = ssd_summary(x.k, x.v, never)
    assert not decay.any()
    for y, expected in zip(ssd_chunked(x.q, x.k, x.v, never), ssd_reference(x.q, x.k, x.v, never), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, ssd_reference(x.q, x.k, x.v, never)[1], rtol=1e-12, atol=1e-12)
