"""Feature maps of linear attention: precision, and results that a second run or another object repeats."""

from __future__ import annotations

import pytest
import torch

from hybridtf.nn import FEATURE_MAPS
from tests.field.layers import F64, every, mixer, same, solo, steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_features_of_far_negative_inputs_do_not_round_to_nothing(dtype):
    x = torch.tensor([-8.0, -6.0, -4.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    y = FEATURE_MAPS["elu1"](x)
    y.sum().backward()
    assert float(y[0].detach()) > 0
    exact = torch.tensor([-8.0, -6.0, -4.0]).exp()
    torch.testing.assert_close(y[:3].detach().float(), exact, rtol=1e-2, atol=0)
    torch.testing.assert_close(x.grad[:3].float(), exact, rtol=1e-2, atol=0)
    assert y[3:].tolist() == [1.0, 4.0]
    assert x.grad[3:].tolist() == [1.0, 1.0]


@every
@torch.no_grad()
def test_runs_repeat_and_another_object_with_the_same_weights_agrees(name):
    """Whatever is drawn at the start is saved, and a step uses what the prefill used."""
    layer, other = mixer(name, "cut"), mixer(name, seed=1)
    x = torch.randn(2, 9, 16, dtype=F64)
    want = layer(x)[0]
    assert torch.equal(layer(x)[0], want)
    assert not torch.equal(other(x)[0], want)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], want)
    layer.train()(x)
    assert torch.equal(layer.eval()(x)[0], want)
    y, state = solo(layer, x[:, :5])
    same(torch.cat([y, steps(other, x[:, 5:], state)[0]], 1), want)
