from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, StateError, crop
from hybridtf.mixers import GRUConfig, LSTMConfig, RNNConfig
from hybridtf.ops.rnn import GATES
from hybridtf.testing import Subject
from hybridtf.testing.laws_outside import check_compile

D = 6
F64 = torch.float64
CASES = [
    (RNNConfig, {}, nn.RNN), (RNNConfig, {"nonlinearity": "relu"}, nn.RNN), (LSTMConfig, {}, nn.LSTM), (GRUConfig, {}, nn.GRU),
]
IDS = ["tanh", "relu", "lstm", "gru"]


def build(config, dtype=F64, **changes):
    return config.build(BuildContext(d_model=D, param_dtype=dtype, **changes)).eval()


def pair(config_cls, options, layer_cls, d_hidden, bias):
    """A mixer and torch's layer with the same weights."""
    mixer = build(config_cls(d_hidden=d_hidden, bias=bias, **options))
    layer = layer_cls(D, d_hidden, bias=bias, batch_first=True, dtype=F64, **options)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(mixer.in_proj.weight)
        layer.weight_hh_l0.copy_(mixer.weight_hh)
        if bias:
            mixer.in_proj.bias.normal_()
            mixer.bias_hh.normal_()
            layer.bias_ih_l0.copy_(mixer.in_proj.bias)
            layer.bias_hh_l0.copy_(mixer.bias_hh)
    return mixer, layer


def last_of(given):
    return given if isinstance(given, tuple) else (given,)


@pytest.mark.parametrize(("config_cls", "options", "layer_cls"), CASES, ids=IDS)
@pytest.mark.parametrize("d_hidden", [D, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("t", [1, 11])
def test_equals_torch_nn(config_cls, options, layer_cls, d_hidden, bias, t):
    mixer, layer = pair(config_cls, options, layer_cls, d_hidden, bias)
    x = torch.randn(3, t, D, dtype=F64, requires_grad=True)
    y, state = mixer(x, state=mixer.init_state(3))
    want, last = layer(x)
    want = want if mixer.out_proj is None else mixer.out_proj(want)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    assert (mixer.out_proj is None) == (d_hidden == D)
    for a, b in zip(state.data.values(), last_of(last), strict=True):
        torch.testing.assert_close(a, b[0], rtol=0, atol=1e-12)
    losses = [(z[0] * z[0].detach().cos()).sum() + sum(s.sum() for s in z[1]) for z in (
        (y, list(state.data.values())), (want, [z[0] for z in last_of(last)])
    )]
    ours = [x, mixer.in_proj.weight, mixer.weight_hh, *([mixer.in_proj.bias, mixer.bias_hh] if bias else [])]
    theirs = [x, layer.weight_ih_l0, layer.weight_hh_l0, *([layer.bias_ih_l0, layer.bias_hh_l0] if bias else [])]
    for a, b in zip(torch.autograd.grad(losses[0], ours), torch.autograd.grad(losses[1], theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("config_cls", "options", "layer_cls"), CASES, ids=IDS)
def test_packed_documents_equal_torch_nn_on_each(config_cls, options, layer_cls):
    mixer, layer = pair(config_cls, options, layer_cls, D, True)
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 2, 2, 3, 0, 3], [1] * 12, [0] * 12])
    x = torch.randn(3, 12, D, dtype=F64)
    before, state = mixer(torch.randn(3, 4, D, dtype=F64), state=mixer.init_state(3))
    assert before.shape == (3, 4, D)
    start = {k: v.detach().clone() for k, v in state.data.items()}
    segments = Segments.from_ids(ids, continues=torch.tensor([False, True, True]))
    y, state = mixer(x, segments=segments, state=state)
    for row, documents in ((0, (1, 2, 3)), (1, (1,))):
        for document in documents:
            at = ids[row] == document
            given = [v[row][None, None] for v in start.values()] if row == 1 else []
            hx = (tuple(given) if config_cls is LSTMConfig else given[0]) if given else None
            want, last = layer(x[row : row + 1, at], hx)
            torch.testing.assert_close(y[row, at], want[0], rtol=0, atol=1e-12)
        for a, b in zip(state.data.values(), last_of(last), strict=True):
            torch.testing.assert_close(a[row], b[0, 0], rtol=0, atol=1e-12)
    for name, value in start.items():
        assert torch.equal(state[name][2], value[2])
    assert state.length.tolist() == [2, 16, 4]
    assert not y[ids == 0].any()


@pytest.mark.parametrize(("config_cls", "options", "layer_cls"), CASES, ids=IDS)
def test_starts(config_cls, options, layer_cls):
    mixer = build(config_cls(**options), dtype=torch.float32)
    gates = GATES[mixer.cell]
    for part in mixer.weight_hh.detach().chunk(len(gates)):
        torch.testing.assert_close(part @ part.T, torch.eye(D), rtol=0, atol=1e-5)
    parts = dict(zip(gates, mixer.in_proj.bias.detach().chunk(len(gates)), strict=True))
    for name, part in parts.items():
        assert (part == (1.0 if name == "f" else 0.0)).all()
    assert not mixer.bias_hh.any()
    assert mixer.splits == {name: dict.fromkeys(gates, D) for name in ("in_proj", "weight_hh")}


def test_the_forget_gate_starts_where_it_is_told():
    mixer = build(LSTMConfig(forget_bias=-0.5))
    assert (mixer.in_proj.bias[D : 2 * D] == -0.5).all()
    assert not mixer.in_proj.bias[:D].any()
    with pytest.raises(RecipeError, match="forget_bias is the start of a bias, and bias is false"):
        LSTMConfig(forget_bias=1.0, bias=False)


def test_an_output_projection_where_asked_for_or_needed():
    assert build(GRUConfig()).out_proj is None
    assert build(GRUConfig(out_proj=True)).out_proj.weight.shape == (D, D)
    assert build(GRUConfig(d_hidden=9)).out_proj.weight.shape == (D, 9)


@pytest.mark.parametrize(("config_cls", "options", "layer_cls"), CASES, ids=IDS)
def test_the_state_of_a_low_precision_model_is_float32(config_cls, options, layer_cls):
    mixer = build(config_cls(**options), dtype=torch.bfloat16)
    y, state = mixer(torch.randn(2, 5, D, dtype=torch.bfloat16), state=mixer.init_state(2))
    assert y.dtype == torch.bfloat16
    assert all(v.dtype == torch.float32 for v in state.data.values())


def test_a_memory_that_is_kept_is_not_rounded_away():
    """An LSTM that adds 1/256 a token: in bfloat16 a cell stops counting at 2."""
    mixer = build(LSTMConfig(d_hidden=1), dtype=torch.bfloat16)
    with torch.no_grad():
        for p in (mixer.in_proj.weight, mixer.weight_hh, mixer.bias_hh):
            p.zero_()
        mixer.in_proj.bias.copy_(torch.tensor([30.0, 30.0, torch.atanh(torch.tensor(1 / 256)), 0.0]))
        _, state = mixer(torch.zeros(1, 2048, D, dtype=torch.bfloat16), state=mixer.init_state(1))
    assert 7.9 < float(state["c"]) < 8.1


@torch.no_grad()
def test_kept_tokens_can_be_taken_back():
    mixer = build(LSTMConfig())
    x = torch.randn(2, 9, D, dtype=F64)
    _, state = mixer(x, state=mixer.init_state(2), keep=3)
    back = crop(state, torch.tensor([3, 1]))
    for row, n in ((0, 6), (1, 8)):
        _, want = mixer(x[row : row + 1, :n], state=mixer.init_state(1))
        for name in ("h", "c"):
            torch.testing.assert_close(back[name][row], want[name][0], rtol=0, atol=1e-12)
    with pytest.raises(StateError, match="cannot be cropped"):
        crop(mixer(x, state=mixer.init_state(2))[1], 1)


def test_a_hook_on_the_projection_is_heard():
    mixer = build(GRUConfig())
    x = torch.randn(2, 7, D, dtype=F64)
    before = mixer(x)[0]
    handle = mixer.in_proj.register_forward_hook(lambda module, inputs, out: out + 1.0)
    heard = mixer(x)[0]
    handle.remove()
    with torch.no_grad():
        mixer.in_proj.bias.add_(1.0)
    torch.testing.assert_close(heard, mixer(x)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(heard, before)


def test_wrong_options_are_refused():
    with pytest.raises(RecipeError, match="nonlinearity"):
        RNNConfig(nonlinearity="gelu")
    with pytest.raises(ConfigError, match="d_hidden"):
        LSTMConfig(d_hidden=0)


@pytest.mark.slow
@pytest.mark.parametrize("config_cls", [RNNConfig, LSTMConfig, GRUConfig])
def test_inductor_agrees_with_eager(config_cls):
    check_compile(Subject("mixers", config_cls.tiny()), backend="inductor")
