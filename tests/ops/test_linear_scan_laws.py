"""The laws of ``linear_scan``: documents alone, cuts anywhere, pads of any content, and parts combined over ranks."""

from __future__ import annotations

import itertools
import random
from functools import reduce

import pytest
import torch
from torch import Tensor

from hybridtf.core import Segments
from hybridtf.ops.linear_scan import linear_scan_chunked, linear_scan_combine, linear_scan_reference, linear_scan_summary
from tests.ops.linear_scan_cases import FORMS, Inputs, assert_same, call, grads, inputs, number, parts
from tests.ops.ssd_cases import random_segments

OPS = [linear_scan_reference, linear_scan_chunked]


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several spans of several chunks in these short rows."""
    monkeypatch.setattr("hybridtf.ops.linear_scan.spans.SPAN_TOKENS", 12)
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", 1)


def alone(x: Inputs, segments: Segments) -> tuple[Tensor, ...]:
    """Every document of every row through the plain recurrence by itself: its states, and those of each row's last one.

    At a pad: the state of the document before it.
    """
    n = len(x.u)
    timed = x.decay[0].ndim == x.u[0].ndim
    rows: list[list[Tensor]] = [[] for _ in range(2 * n)]
    for row in range(len(x.u[0])):
        ids = segments.ids[row]
        forgets = not segments.continues[row] and bool((ids > 0).any())
        state = tuple(torch.zeros_like(s[row]) if forgets else s[row] for s in x.state)
        columns = [state] * len(ids)
        for i, doc in enumerate(sorted(set(ids.tolist()) - {0})):
            at = (ids == doc).nonzero()[:, 0]
            first = state if i == 0 and segments.continues[row] else None
            own = Inputs(
                tuple(u[row : row + 1, at] for u in x.u), tuple(d[row : row + 1, at] if timed else d for d in x.decay),
                tuple(s[None] for s in first or ()), x.log,
            )
            out = call(linear_scan_reference, own, given=first is not None)
            for place, column in enumerate(at.tolist()):
                columns[column:] = [tuple(h[0, place] for h in out[:n])] * (len(columns) - column)
            state = tuple(last[0] for last in out[n:])
        for i in range(n):
            rows[i].append(torch.stack([c[i] for c in columns]))
            rows[n + i].append(state[i])
    return tuple(torch.stack(r) for r in rows)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_document_as_if_alone(op, form) -> None:
    for seed in range(2):
        x, segments = inputs(seed, 5, 31, pair=form[0], log=form[1], timeless=form[2]), random_segments(seed, 5, 31)
        assert_same(x, call(op, x, segments=segments), alone(x, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[5, 11, 3, 13], [5, 1, 9, 3], [0, 1, 0, 1], [3, 0, 4]])
@pytest.mark.parametrize("continues", [False, True])
def test_packed_documents_some_empty(op, lengths: list[int], continues: bool) -> None:
    x, segments = inputs(1, 1, sum(lengths)), Segments.from_lengths([lengths], continues=continues)
    assert_same(x, call(op, x, segments=segments), alone(x, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 9])
def test_rows_of_pads_leave_the_state_untouched(op, t: int) -> None:
    x = inputs(3, 2, t)
    segments = Segments.from_mask(torch.zeros(2, t), continues=torch.tensor([True, False]))
    h, last = call(op, x, segments=segments)
    assert torch.equal(last, x.state[0])
    assert torch.equal(h, x.state[0][:, None].expand_as(h))
    assert torch.equal(torch.autograd.grad(last.sum(), x.state[0])[0], torch.ones_like(last))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", [f for f in FORMS if not f[2]], ids=str)
@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_content_of_pads_and_of_dropped_states_has_no_effect(op, form, garbage: float) -> None:
    for t in (1, 29):
        x, segments = inputs(5, 8, t, pair=form[0], log=form[1], dtype=torch.float32), random_segments(5, 8, t)
        if t == 1:
            segments = Segments.from_ids(torch.tensor([[0], [1]] * 4), continues=torch.arange(8) < 4)
        pads, dropped = ~segments.real, ~segments.continues & (segments.last_id > 0)
        assert pads.any()
        assert dropped.any()
        dirty = x.map(lambda y: y.detach().clone())
        for y in (*dirty.u, *dirty.decay):
            y[pads] = garbage
        for y in dirty.state:
            y[dropped] = garbage
        dirty = dirty.map(Tensor.requires_grad_)
        first, second = (call(op, z, segments=segments) for z in (x, dirty))
        for a, b in zip((*first, *grads(first, x)), (*second, *grads(second, dirty)), strict=True):
            assert torch.equal(a, b)


def test_gradients_do_not_cross_documents() -> None:
    x, segments = inputs(2, 1, 20), Segments.from_lengths([[9, 11]])
    h, last = call(linear_scan_chunked, x, segments=segments)
    late = torch.autograd.grad(h[:, 9:].sum() + last.sum(), x.leaves)
    assert not late[0][:, :9].any()
    assert not late[1][:, :10].any()
    assert not late[2].any()


def run_in_parts(op, x: Inputs, cuts: list[int], segments: Segments | None) -> tuple[Tensor, ...]:
    n, t = len(x.u), x.u[0].shape[1]
    pieces, state = [], x.state
    for start, stop in zip([0, *cuts], [*cuts, t], strict=True):
        part = None if segments is None else segments.narrow(start, stop)
        out = call(op, x.narrow(start, stop)._replace(state=state), segments=part)
        pieces.append(out[:n])
        state = out[n:]
    return (*(torch.cat(p, 1) for p in zip(*pieces, strict=True)), *state)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cut_law(form, packed: bool) -> None:
    x = inputs(9, 3, 64, pair=form[0], log=form[1], timeless=form[2])
    segments = random_segments(9, 3, 64) if packed else None
    whole, rng = call(linear_scan_reference, x, segments=segments), random.Random(0)
    for _ in range(4):
        cuts = sorted(rng.choices(range(65), k=rng.randint(1, 6)))
        assert_same(x, run_in_parts(linear_scan_chunked, x, cuts, segments), whole)
    assert_same(x, run_in_parts(linear_scan_reference, x, [5, 5, 60], segments), whole)


def test_one_token_at_a_time_with_segments() -> None:
    x, segments = inputs(4, 4, 12, pair=True), random_segments(4, 4, 12)
    parts_of = run_in_parts(linear_scan_chunked, x, list(range(1, 12)), segments)
    assert_same(x, parts_of, call(linear_scan_reference, x, segments=segments))


def test_causal_law() -> None:
    x = inputs(4, 1, 40)
    h, _ = call(linear_scan_chunked, x)
    for g in torch.autograd.grad(h[:, :17].square().sum(), x.leaves[:2]):
        assert not g[:, 17:].any()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_combined_summaries_equal_the_whole(form, packed: bool) -> None:
    x = inputs(7, 3, 50, pair=form[0], log=form[1], timeless=form[2])
    segments, n = random_segments(7, 3, 50) if packed else None, len(x.u)
    name = "log_a" if x.log else "a"
    stretches = []
    for start, stop in itertools.pairwise([0, 0, 7, 8, 30, 50]):
        part, own = None if segments is None else segments.narrow(start, stop), x.narrow(start, stop)
        stretches.append(linear_scan_summary(number(own.u), **{name: number(own.decay)}, segments=part))
    left = reduce(linear_scan_combine, stretches)
    right = reduce(lambda later, earlier: linear_scan_combine(earlier, later), reversed(stretches))
    whole = linear_scan_summary(number(x.u), **{name: number(x.decay)}, segments=segments)
    for other in (left, right):
        for a, b in zip(other, whole, strict=True):
            for p, q in zip(parts(a), parts(b), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    zero = number(tuple(torch.zeros_like(s) for s in x.state))
    state = parts(linear_scan_combine((zero, number(x.state)), left)[1])
    assert_same(x, state, call(linear_scan_reference, x, segments=segments)[n:])


def test_a_summary_is_zero_where_the_document_is_another() -> None:
    u, log_a = torch.randn(3, 6, 2), -torch.rand(3, 6, 2)
    segments = Segments.from_ids(torch.tensor([[1] * 6, [1, 1, 2, 2, 2, 0], [0] * 6]))
    decay, state = linear_scan_summary(u, log_a, segments=segments)
    torch.testing.assert_close(decay[0], log_a[0].sum(0).exp(), rtol=1e-6, atol=0)
    assert not decay[1].any()
    assert torch.equal(decay[2], torch.ones(2))
    assert not state[2].any()
