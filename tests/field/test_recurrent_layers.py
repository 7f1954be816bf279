"""Inputs of no tokens and rows of length 0, which the classic recurrent layers refuse."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import Segments
from hybridtf.testing.compare import close_rows, close_states
from tests.field.layers import F64, every, mixer, same, solo

CLASSIC = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


@every
@pytest.mark.parametrize("grad", [False, True])
def test_no_tokens_give_no_output_and_leave_the_state(name, grad):
    layer = mixer(name, "cut")
    before, none = torch.randn(3, 4, 16, dtype=F64), torch.zeros(3, 0, 16, dtype=F64)
    with torch.set_grad_enabled(grad):
        for segments in (None, Segments.from_lengths([[0], [0], [0]])):
            y, state = layer(none, segments=segments, state=solo(layer, before)[1])
            assert y.shape == (3, 0, 16)
            close_states(state, solo(layer, before)[1], tol=0.0, what="after no tokens")
            assert layer(none, segments=segments)[0].shape == (3, 0, 16)


@every
@torch.no_grad()
def test_a_row_of_length_zero_keeps_its_state_beside_others(name):
    layer = mixer(name, "segment", "cut")
    before, x = torch.randn(3, 4, 16, dtype=F64), torch.randn(3, 3, 16, dtype=F64)
    lengths = [0, 3, 2]
    y, state = layer(x, segments=Segments.from_lengths([[n] for n in lengths]), state=solo(layer, before)[1])
    for row, n in enumerate(lengths):
        part = slice(row, row + 1)
        want, alone = layer(x[part, :n], state=solo(layer, before[part])[1])
        same(y[part, :n], want)
        close_rows(state, row, alone, 0, tol=1e-10, what=f"row of {n} tokens")


@pytest.mark.parametrize("name", CLASSIC)
@torch.no_grad()
def test_given_lengths_and_a_given_state_equal_torch_on_each_row(name):
    layer = mixer(name, d_hidden=16)
    theirs = CLASSIC[name](16, 16, batch_first=True, dtype=F64)
    for ours, their in (
        (layer.in_proj.weight, "weight_ih_l0"), (layer.in_proj.bias, "bias_ih_l0"), (layer.weight_hh, "weight_hh_l0"),
        (layer.bias_hh, "bias_hh_l0"),
    ):
        getattr(theirs, their).copy_(ours)
    before, x, lengths = torch.randn(3, 4, 16, dtype=F64), torch.randn(3, 3, 16, dtype=F64), [0, 3, 2]
    _, state = solo(layer, before)
    _, hidden = theirs(before)
    y, state = layer(x, segments=Segments.from_lengths([[n] for n in lengths]), state=state)
    for row, n in enumerate(lengths):
        last = tuple(h[:, row] for h in hidden) if name == "lstm" else hidden[:, row]
        if n:
            want, last = theirs(x[row, :n], last)
            same(y[row, :n], want)
        h = last[0] if name == "lstm" else last
        same(state["h"][row], h[0])
        if name == "lstm":
            same(state["c"][row], last[1][0])
