"""The laws of ``selective_scan``: documents alone, cuts anywhere, pads of any content, and parts combined over ranks."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.selective_scan import (
    selective_scan_chunked,
    selective_scan_combine,
    selective_scan_reference,
    selective_scan_summary,
)
from tests.ops.recurrence_cases import (
    assert_same,
    call,
    check_content_of_pads,
    check_cuts,
    check_packed,
    check_rows_of_pads,
    run_in_parts,
)
from tests.ops.selective_scan_cases import Inputs, inputs
from tests.ops.ssd_cases import random_segments

OPS = [selective_scan_reference, selective_scan_chunked]
ALL = slice(None)


def alone(x: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """Every document of every row through the plain recurrence by itself, and the state of each row's last one."""
    y, states = torch.zeros_like(x.x), []
    for row in range(len(x.x)):
        state = x.initial_state[row : row + 1]
        ids = segments.ids[row]
        for i, doc in enumerate(sorted(set(ids.tolist()) - {0})):
            at = (ids == doc).nonzero()[:, 0]
            first = state if i == 0 and segments.continues[row] else None
            part, state = selective_scan_reference(*x.part(slice(row, row + 1), at), initial_state=first)
            y = y.index_put((torch.tensor(row), at), part[0])
        states.append(state[0])
    return y, torch.stack(states)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(4))
def test_each_document_as_if_alone(op, seed: int) -> None:
    x, segments = inputs(seed, 5, 41), random_segments(seed, 5, 41)
    assert_same(x, call(op, x, segments=segments, chunk_size=8), alone(x, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[5, 11, 3, 13], [8, 8, 8], [0, 1, 0, 1], [3, 0, 4], [0, 0], []])
@pytest.mark.parametrize("continues", [False, True])
def test_packed_documents_some_empty(op, lengths: list[int], continues: bool) -> None:
    check_packed(op, inputs(1, 1, sum(lengths)), lengths, continues, alone)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 9])
def test_rows_of_pads_leave_the_state_untouched(op, t: int) -> None:
    check_rows_of_pads(op, inputs(3, 2, t), t)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 11, 40])
@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_content_of_pads_and_of_dropped_states_has_no_effect(op, t: int, garbage: float) -> None:
    x, segments = inputs(5, 8, t, dtype=torch.float32), random_segments(5, 8, t)
    check_content_of_pads(op, x, segments, x.in_time, [garbage] * 4)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_results_at_pads_have_no_effect(op) -> None:
    x, segments = inputs(5, 4, 20), random_segments(6, 4, 20)
    y, _ = call(op, x, segments=segments, chunk_size=8)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, x, dy, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(y, x, dy.masked_fill(~segments.real[..., None], torch.nan), allow_unused=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_decoding_goes_on_from_a_padded_prefill() -> None:
    x = inputs(6, 2, 15)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    _, state = selective_scan_chunked(*x.part(ALL, slice(12)), segments=Segments.from_mask(mask), chunk_size=8)
    _, short = selective_scan_chunked(*x.part(slice(1), slice(7)), chunk_size=8)
    for i in range(12, 15):
        y, state = selective_scan_chunked(*x.part(ALL, slice(i, i + 1)), initial_state=state)
        own, short = selective_scan_chunked(*x.part(slice(1), slice(i, i + 1)), initial_state=short)
        torch.testing.assert_close(y[:1], own, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_cut_law(op, packed: bool) -> None:
    x, segments = inputs(9, 3, 96), random_segments(9, 3, 96) if packed else None
    check_cuts(op, x, segments, x.in_time, 20 if op is selective_scan_chunked else 4)


@pytest.mark.parametrize("chunk_size", [32, 48])
def test_long_input_streamed_in_float32(chunk_size: int) -> None:
    x = inputs(2, 1, 256, n=8, dtype=torch.float32, step=0.1)
    fresh = x._replace(initial_state=torch.zeros(1, 4, 8))
    whole, _ = selective_scan_chunked(*x[:6], chunk_size=chunk_size)
    parts, _ = run_in_parts(selective_scan_chunked, fresh, [64, 128, 192], None, chunk_size, x.in_time)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    again, _ = run_in_parts(selective_scan_chunked, fresh, [64, 128, 192], None, chunk_size, x.in_time)
    assert torch.equal(parts, again)


def test_one_token_at_a_time_with_segments() -> None:
    x, segments = inputs(4, 4, 12, g=2), random_segments(4, 4, 12)
    parts = run_in_parts(selective_scan_chunked, x, list(range(1, 12)), segments, 64, x.in_time)
    assert_same(x, parts, call(selective_scan_reference, x, segments=segments))


def test_causal_law() -> None:
    x = inputs(4, 1, 40)
    y, _ = call(selective_scan_chunked, x, chunk_size=16)
    later = torch.autograd.grad(y[:, :17].square().sum(), [x[i] for i in x.in_time])
    assert all(g[:, :17].any() and not g[:, 17:].any() for g in later)


def maps(x: Inputs, times: slice) -> list[Tensor]:
    return x.part(ALL, times)[:4]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("g", [None, 2])
def test_combined_summaries_equal_the_whole(seed: int, g: int | None) -> None:
    segments = None if seed == 0 else random_segments(seed, 3, 50)
    x = inputs(seed, 3, 50, g=g)
    _, last = call(selective_scan_reference, x, segments=segments)
    parts = []
    for start, stop in itertools.pairwise([0, 0, 7, 8, 30, 50]):
        part = None if segments is None else segments.narrow(start, stop)
        parts.append(selective_scan_summary(*maps(x, slice(start, stop)), segments=part, chunk_size=8))
    left = reduce(selective_scan_combine, parts)
    right = reduce(lambda later, earlier: selective_scan_combine(earlier, later), reversed(parts))
    whole = selective_scan_summary(*x[:4], segments=segments)
    for a, b, c in zip(left, right, whole, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b, c, rtol=1e-10, atol=1e-10)
    state = left[0] * x.initial_state + left[1]
    zero = torch.zeros_like(x.x)
    assert_same(x, (zero, state), (zero, last))


def test_ranks_start_from_combined_summaries() -> None:
    x, segments = inputs(11, 3, 60), random_segments(11, 3, 60)
    whole, _ = call(selective_scan_chunked, x, segments=segments)
    so_far = torch.ones_like(x.initial_state), torch.zeros_like(x.initial_state)
    for start in range(0, 60, 15):
        part, times = segments.narrow(start, start + 15), slice(start, start + 15)
        given = so_far[0] * x.initial_state + so_far[1]
        y, _ = selective_scan_chunked(*x.part(ALL, times), initial_state=given, segments=part)
        torch.testing.assert_close(y, whole[:, times], rtol=1e-10, atol=1e-10)
        so_far = selective_scan_combine(so_far, selective_scan_summary(*maps(x, times), segments=part))


def test_summary_refuses_wrong_shapes() -> None:
    x = inputs(0, 2, 9)
    with pytest.raises(ConfigError, match="A must be"):
        selective_scan_summary(x.x, x.dt, x.A.T, x.B)
