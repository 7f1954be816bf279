"""The token before, over documents, pads and calls; convolutions side by side equal each alone."""

from __future__ import annotations

import torch

from hybridtf.core import BuildContext, Segments, init_parameters
from hybridtf.nn import ShortConv, ShortConvs, TokenShift


def test_token_shift_over_documents_pads_and_calls() -> None:
    shift = TokenShift(BuildContext(d_model=3, param_dtype=torch.float64))
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    y, none = shift(x, None, None)
    assert none is None
    assert torch.equal(y[:, 1:], x[:, :-1])
    assert not y[:, 0].any()
    ids = torch.tensor([[0, 1, 0, 1, 2, 2, 0, 2, 3], [1, 1, 1, 0, 0, 0, 0, 0, 0]])
    y, state = shift(x, Segments.from_ids(ids), shift.init_state(2))
    expected = torch.zeros_like(x)
    expected[0, 3], expected[0, 5], expected[0, 7] = x[0, 1], x[0, 4], x[0, 5]
    expected[1, 1], expected[1, 2] = x[1, 0], x[1, 1]
    assert torch.equal(y, expected)
    assert torch.equal(state["last"][:, 0], torch.stack([x[0, 8], x[1, 2]]))
    y, _ = shift(x[:, :1], None, state)
    assert torch.equal(y, state["last"])


def test_convolutions_side_by_side() -> None:
    ctx = BuildContext(d_model=8, param_dtype=torch.float64)
    convs = ShortConvs(ctx, {"q": 4, "v": 6}, 3)
    init_parameters(convs, 0)
    x = {"q": torch.randn(2, 7, 4, dtype=torch.float64), "v": torch.randn(2, 7, 6, dtype=torch.float64)}
    out, state = convs(x, None, convs.init_state(2))
    assert convs(x, None, None)[1] is None
    for name, given in x.items():
        alone = convs.get_submodule(name)
        assert isinstance(alone, ShortConv)
        y, last = alone(given, None, alone.init_state(2))
        assert torch.equal(out[name], y)
        assert torch.equal(state[name]["window"], last["window"])
