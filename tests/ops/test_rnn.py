"""``rnn`` against ``torch.nn``, and under documents, pads, cuts and lengths of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.rnn import STATES, rnn_fused, rnn_reference
from hybridtf.ops.rnn.documents import lay_out
from tests.ops.rnn_cases import CELLS, OPS, alone, assert_same, grads, inputs, leaves
from tests.ops.ssd_cases import random_segments


def by_torch(given: dict[str, Any]) -> tuple[Any, Any]:
    """The layer of ``torch.nn`` with these very tensors as its weights."""
    cell, h, d = given["cell"], given["weight_hh"].shape[1], given["x"].shape[-1]
    bias = "bias_hh" in given
    kinds: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
    layer = kinds[cell](d, h, bias=bias, batch_first=True) if cell in kinds else nn.RNN(
        d, h, bias=bias, batch_first=True, nonlinearity=cell
    )
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if bias else [])]
    weights = {f"{name}_l0": given[name] for name in names}
    start = tuple(v[None] for v in given["initial_state"].values())
    y, last = torch.func.functional_call(layer.double(), weights, (given["x"], start if cell == "lstm" else start[0]))
    last = last if cell == "lstm" else (last,)
    return y, dict(zip(STATES[cell], (z[0] for z in last), strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("b", "t", "d", "h"), [(2, 13, 4, 3), (1, 2, 3, 5), (3, 1, 4, 4), (2, 7, 1, 1)])
def test_equals_torch_nn(op: Any, cell: str, bias: bool, b: int, t: int, d: int, h: int) -> None:
    given = inputs(t, cell, b, t, d, h, bias=bias)
    assert_same(given, op(**given), by_torch(given))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("t", [0, 1, 6])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_gates_that_are_given(cell: str, t: int, packed: bool, bias: bool) -> None:
    """x as the input's share of the gates, as an adapter on the projection makes it."""
    given = inputs(2, cell, 2, t, project=False, bias=bias)
    segments = random_segments(1, 2, t) if packed else None
    expected = rnn_reference(**given, segments=segments)
    assert_same(given, rnn_fused(**given, segments=segments), expected)
    whole = inputs(5, cell, 2, t)
    share = {k: v for k, v in whole.items() if k not in ("x", "weight_ih", "bias_ih")}
    for op in OPS:
        u = whole["x"] @ whole["weight_ih"].T + whole["bias_ih"]
        assert_same(whole, op(u, segments=segments, **share), rnn_reference(**whole, segments=segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("seed", range(3))
def test_each_document_as_if_alone(op: Any, cell: str, seed: int) -> None:
    given, segments = inputs(seed, cell, 5, 23), random_segments(seed, 5, 23)
    assert_same(given, op(**given, segments=segments), alone(given, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", ["tanh", "lstm"])
@pytest.mark.parametrize("lengths", [[5, 11, 3, 13], [5, 1, 9, 3], [0, 1, 0, 1], [3, 0, 4], [2, 2, 2], [0, 0], []])
@pytest.mark.parametrize("continues", [False, True])
def test_packed_documents_some_empty(op: Any, cell: str, lengths: list[int], continues: bool) -> None:
    given, segments = inputs(1, cell, 1, sum(lengths)), Segments.from_lengths([lengths], continues=continues)
    y, state = op(**given, segments=segments)
    assert_same(given, (y, state), alone(given, segments))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
def test_rows_of_length_nothing_keep_their_state(op: Any, cell: str) -> None:
    """Lengths 0, 3, 2 in a batch; torch's packed sequences refuse the first."""
    given = inputs(4, cell, 3, 3)
    segments = Segments.from_lengths([[0], [3], [2]])
    y, state = op(**given, segments=segments)
    assert_same(given, (y, state), alone(given, segments))
    for name, start in given["initial_state"].items():
        assert torch.equal(state[name][0], start[0])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("b", "t"), [(2, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_ordinary_input(op: Any, cell: str, b: int, t: int, packed: bool) -> None:
    given = inputs(0, cell, b, t)
    segments = Segments.from_mask(torch.ones(b, t)) if packed else None
    y, state = op(**given, segments=segments)
    assert y.shape == (b, t, 3)
    for name, start in given["initial_state"].items():
        assert torch.equal(state[name], start)
    assert all(torch.isfinite(g).all() for g in grads(y, state, given))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("t", [1, 9])
def test_rows_of_pads_leave_the_state_untouched_whatever_they_hold(op: Any, cell: str, t: int) -> None:
    given = inputs(3, cell, 2, t)
    with torch.no_grad():
        given["x"].fill_(float("nan"))
    segments = Segments.from_mask(torch.zeros(2, t), continues=torch.tensor([True, False]))
    y, state = op(**given, segments=segments)
    assert not y.any()
    for name, start in given["initial_state"].items():
        assert torch.equal(state[name], start)
    assert all(torch.isfinite(g).all() for g in grads(y, state, given))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("cut", [(13,), (1,) * 13, (5, 8), (1, 12), (12, 1), (4, 0, 9), (2, 7, 3, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_cut_anywhere(cell: str, cut: tuple[int, ...], packed: bool) -> None:
    given, segments = inputs(6, cell, 3, 13), random_segments(6, 3, 13) if packed else None
    rest = {k: v for k, v in given.items() if k not in ("x", "initial_state")}
    state, parts, at = given["initial_state"], [], 0
    for size in cut:
        part = None if segments is None else segments.narrow(at, at + size)
        y, state = rnn_fused(given["x"][:, at : at + size], initial_state=state, segments=part, **rest)
        parts.append(y)
        at += size
    assert_same(given, (torch.cat(parts, 1), state), rnn_reference(**given, segments=segments))


def test_documents_are_few_rectangles_without_pads() -> None:
    lengths = [[40, 1, 7, 1, 3], [9, 9, 34]]
    documents = lay_out(Segments.from_lengths(lengths))
    assert documents.rectangles == [(1, 8), (2, 6), (4, 5), (2, 4), (25, 2), (6, 1)]
    assert sum(steps * m for steps, m in documents.rectangles) == sum(map(sum, lengths)) == len(documents.tokens)
    assert sorted(documents.tokens.tolist()) == list(range(104))
    for seed in range(6):
        segments = random_segments(seed, 4, 200)
        n = int(segments.real.sum())
        assert len(lay_out(segments).rectangles) ** 2 <= 2 * n + 1


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_not_given_starts_at_zero(cell: str) -> None:
    given = inputs(8, cell, 2, 5)
    zeros = {k: torch.zeros_like(v) for k, v in given["initial_state"].items()}
    for op in OPS:
        plain = op(**{**given, "initial_state": None})
        assert_same(given, plain, op(**{**given, "initial_state": zeros}))


def test_arguments_that_do_not_fit_are_refused() -> None:
    given = inputs(0, "gru", 2, 5)
    wrong = {
        "cell": ("grü", r"no cell named 'grü'. Did you mean 'gru'\? Known: gru, lstm, relu, tanh"),
        "x": (torch.zeros(2, 5), r"x must be \(b t d\)"),
        "weight_hh": (torch.zeros(8, 3), r"weight_hh of cell 'gru' must be \(3 h, h\); got \(8, 3\)"),
        "weight_ih": (torch.zeros(9, 5), r"weight_ih must be \(9, 4\); got \(9, 5\)"),
        "bias_hh": (torch.zeros(3), r"bias_hh must be \(9,\); got \(3,\)"),
        "initial_state": ({"h": torch.zeros(1, 3)}, r"initial_state\['h'\] must be \(b h\) = \(2, 3\); got \(1, 3\)"),
    }
    for op in OPS:
        for name, (value, message) in wrong.items():
            with pytest.raises(ConfigError, match=message):
                op(**{**given, name: value})
        with pytest.raises(ConfigError, match="bias_ih belongs to weight_ih"):
            op(**{**given, "weight_ih": None})
        with pytest.raises(ConfigError, match="x without weight_ih must be 9 wide; got 4"):
            op(**{**given, "weight_ih": None, "bias_ih": None})
        with pytest.raises(ConfigError, match=r"segments must be \(b t\) = \(2, 5\)"):
            op(**given, segments=Segments.from_mask(torch.ones(2, 4)))
        with pytest.raises(ConfigError, match=r"initial_state\['c'\] must be"):
            op(**{**inputs(0, "lstm", 2, 5), "initial_state": given["initial_state"]})


@pytest.mark.parametrize("cell", CELLS)
def test_twice_differentiable_where_torch_is(cell: str) -> None:
    given = inputs(9, cell, 1, 4)
    y, _ = rnn_reference(**given)
    first = torch.autograd.grad(y.square().sum(), leaves(given), create_graph=True)
    assert torch.autograd.grad(sum(g.square().sum() for g in first), given["x"])[0].isfinite().all()
