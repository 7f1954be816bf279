from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, crop
from hybridtf.mixers import GriffinRecurrentConfig, RGLRUConfig
from hybridtf.nn import RGLRU
from hybridtf.nn.rg_lru import input_scale

D, HEADS, WIDTH = 10, 3, 12
F64 = torch.float64


def recurrence(dtype=F64, **options) -> RGLRU:
    """The recurrence alone, biases away from their zero start."""
    layer = RGLRU(BuildContext(d_model=WIDTH, param_dtype=dtype), HEADS, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)
    return layer


def block(dtype=F64, seed: int = 0, **options):
    config = GriffinRecurrentConfig(n_heads=HEADS, d_inner=WIDTH, **options)
    mixer = config.build(BuildContext(d_model=D, param_dtype=dtype))
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=dtype) * 0.2)
    return mixer


def theirs():
    """transformers' module of RecurrentGemma, and its config for these sizes."""
    modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    from transformers import RecurrentGemmaConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RecurrentGemmaConfig(
            hidden_size=D, lru_width=WIDTH, num_attention_heads=HEADS, num_hidden_layers=3, vocab_size=16,
            intermediate_size=8, conv1d_width=4, head_dim=4,
        )
    return modeling, config


def their_recurrence(layer: RGLRU):
    modeling, config = theirs()
    other = modeling.RecurrentGemmaRglru(config).double()
    copied = {
        "recurrent_param": layer.Lambda, "input_gate_weight": layer.input_gate.weight,
        "input_gate_bias": layer.input_gate.bias, "recurrent_gate_weight": layer.recurrence_gate.weight,
        "recurrent_gate_bias": layer.recurrence_gate.bias,
    }
    other.load_state_dict({name: value.detach().clone() for name, value in copied.items()})
    return other, {name: dict(other.named_parameters())[name] for name in copied}, list(copied.values())


def their_scan_in_float64(other, x, positions):
    """Their loop accumulates in float32 unless told otherwise."""
    scan = type(other)._rnn_scan
    other._rnn_scan = lambda **given: scan(other, **given, acc_dtype=F64)
    other.recurrent_states = None
    return other(x, positions)


@pytest.mark.parametrize("t", [2, 3, 17, 40])
def test_recurrence_equals_that_of_recurrent_gemma(t: int) -> None:
    layer = recurrence()
    other, their_params, our_params = their_recurrence(layer)
    x = torch.randn(2, t, WIDTH, dtype=F64, requires_grad=True)
    weight = torch.randn(2, t, WIDTH, dtype=F64)
    want = their_scan_in_float64(other, x, torch.arange(t).expand(2, -1))
    got, none = layer(x, None, None)
    assert none is None
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    ours = torch.autograd.grad((got * weight).sum(), [x, *our_params])
    wanted = torch.autograd.grad((want * weight).sum(), [x, *their_params.values()])
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_packed_documents_equal_positions_that_restart() -> None:
    """Their resets come from position 0: each document's first token, unscaled and with no past."""
    layer = recurrence()
    other, _, _ = their_recurrence(layer)
    lengths = [5, 1, 1, 9, 4]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    x = torch.randn(1, sum(lengths), WIDTH, dtype=F64)
    want = their_scan_in_float64(other, x, positions)
    got, _ = layer(x, Segments.from_lengths([lengths]), None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for part, own in zip(x.split(lengths, 1), got.split(lengths, 1), strict=True):
        torch.testing.assert_close(layer(part, None, None)[0], own, rtol=0, atol=1e-12)


def copy_block(mixer):
    modeling, config = theirs()
    other = modeling.RecurrentGemmaRecurrentBlock(config, 0).double()
    pairs = {
        "linear_y.weight": mixer.gate_proj.weight, "linear_y.bias": mixer.gate_proj.bias,
        "linear_x.weight": mixer.in_proj.weight, "linear_x.bias": mixer.in_proj.bias,
        "linear_out.weight": mixer.out_proj.weight, "linear_out.bias": mixer.out_proj.bias,
        "conv_1d.weight": mixer.conv.weight, "conv_1d.bias": mixer.conv.bias,
        "rg_lru.recurrent_param": mixer.rg_lru.Lambda,
        "rg_lru.input_gate_weight": mixer.rg_lru.input_gate.weight, "rg_lru.input_gate_bias": mixer.rg_lru.input_gate.bias,
        "rg_lru.recurrent_gate_weight": mixer.rg_lru.recurrence_gate.weight,
        "rg_lru.recurrent_gate_bias": mixer.rg_lru.recurrence_gate.bias,
    }
    state = other.state_dict()
    assert set(state) == set(pairs)
    assert len(list(mixer.parameters())) == len(pairs)
    other.load_state_dict({name: value.detach().clone().view(state[name].shape) for name, value in pairs.items()})
    scan = type(other.rg_lru)._rnn_scan
    other.rg_lru._rnn_scan = lambda **given: scan(other.rg_lru, **given, acc_dtype=F64)
    return other, [dict(other.named_parameters())[name] for name in pairs], list(pairs.values())


@pytest.mark.parametrize("t", [2, 3, 5, 29])
def test_block_equals_that_of_recurrent_gemma(t: int) -> None:
    mixer = block()
    other, their_params, our_params = copy_block(mixer)
    x = torch.randn(2, t, D, dtype=F64, requires_grad=True)
    weight = torch.randn(2, t, D, dtype=F64)
    want, _ = other(x, torch.arange(t)[None].expand(2, -1), None, use_cache=False)
    got, _ = mixer(x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    ours, wanted = (
        torch.autograd.grad((y * weight).sum(), [x, *params]) for y, params in ((got, our_params), (want, their_params))
    )
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b.view(a.shape), rtol=0, atol=1e-10)


@torch.no_grad()
def test_decode_equals_that_of_recurrent_gemma() -> None:
    mixer = block()
    other, _, _ = copy_block(mixer)
    x = torch.randn(2, 12, D, dtype=F64)
    want = [other(x[:, :6], torch.arange(6)[None], None)[0]]
    want += [other(x[:, i : i + 1], torch.full((1, 1), i), None)[0] for i in range(6, 12)]
    y, state = mixer(x[:, :6], state=mixer.init_state(2))
    got = [y]
    for i in range(6, 12):
        y, state = mixer(x[:, i : i + 1], state=state)
        got.append(y)
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(want, 1), rtol=0, atol=1e-6)  # their cache is float32
    torch.testing.assert_close(torch.cat(got, 1), mixer(x)[0], rtol=0, atol=1e-12)


def by_hand(mixer, x):
    """One row (t d), token by token, from the equations at the top of the modules."""
    griffin = isinstance(mixer.config, GriffinRecurrentConfig)
    inner = mixer.in_proj(x)
    if griffin:
        padded = F.pad(inner, (0, 0, mixer.config.d_conv - 1, 0))
        inner = torch.stack([(padded[i : i + mixer.config.d_conv] * mixer.conv.weight.T).sum(0) for i in range(len(x))])
        inner = inner if mixer.conv.bias is None else inner + mixer.conv.bias
    part, n = mixer.rg_lru, mixer.config.n_heads
    h, rows = torch.zeros(inner.shape[1], dtype=x.dtype), []
    for i, v in enumerate(inner):
        r, gate = (
            torch.sigmoid(torch.cat([u @ w + b for u, w, b in zip(v.view(n, -1), g.weight, g.bias, strict=True)]))
            for g in (part.recurrence_gate, part.input_gate)
        )
        a = torch.exp(-F.softplus(part.Lambda)) ** (mixer.config.decay_power * r)
        h = a * h + (torch.sqrt(1 - a**2) if i else 1.0) * gate * v
        rows.append(h)
    y = torch.stack(rows)
    return mixer.out_proj(mixer.activation(mixer.gate_proj(x)) * y if griffin else y)


@pytest.mark.parametrize(
    "config",
    [
        GriffinRecurrentConfig(n_heads=3, d_inner=12, bias=False, conv_bias=False, d_conv=2, activation="silu"),
        GriffinRecurrentConfig(n_heads=5, decay_power=2.0, d_conv=1, a_range=(0.2, 0.5)),
        RGLRUConfig(n_heads=2), RGLRUConfig(n_heads=10, bias=True), RGLRUConfig(n_heads=1, d_inner=7, decay_power=1.0),
    ],
    ids=str,
)
def test_forward_and_gradients_equal_the_plain_loop(config) -> None:
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64))
    x = torch.randn(9, D, dtype=F64, requires_grad=True)
    params, weight = [x, *mixer.parameters()], torch.randn(9, D, dtype=F64)
    got, want = mixer(x[None])[0][0], by_hand(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    ours, theirs_ = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs_, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_start_in_their_range(dtype: torch.dtype) -> None:
    for low, high in ((0.9, 0.999), (0.3, 0.4)):
        place = BuildContext(d_model=8, param_dtype=dtype)
        layer = RGLRUConfig(n_heads=2, d_inner=2048, a_range=(low, high)).build(place).rg_lru
        a = torch.exp(-F.softplus(layer.Lambda.detach().double()))
        slack = 1e-4 if dtype == torch.float32 else 2e-3
        assert low - slack < float(a.min()) < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < float(a.max()) < high + slack
        middle = math.sqrt((low**2 + high**2) / 2)  # a^2 is evenly spread
        assert abs(float(a.median()) - middle) < 0.05 * (high - low)


def test_their_start_is_ours() -> None:
    """RecurrentGemma's own initialisation fills the same range."""
    modeling, config = theirs()
    config.lru_width = 3000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = modeling.RecurrentGemmaModel(config)
    theirs_a = torch.exp(-F.softplus(model.layers[0].temporal_block.rg_lru.recurrent_param.detach().double()))
    ours = RGLRUConfig(n_heads=1, d_inner=3000).build(BuildContext(d_model=8)).rg_lru
    ours_a = torch.exp(-F.softplus(ours.Lambda.detach().double()))
    for q in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert abs(float(theirs_a.quantile(q) - ours_a.quantile(q))) < 4e-3


def test_the_input_scale_is_exact_near_one() -> None:
    log_a = -torch.logspace(-37, 2, 200, dtype=torch.float32)
    wide = log_a.double()
    exact = torch.sqrt(-torch.expm1(2 * wide))
    torch.testing.assert_close(input_scale(log_a).double(), exact, rtol=3e-7, atol=0)
    leaf = log_a.clone().requires_grad_()
    (slope,) = torch.autograd.grad(input_scale(leaf).sum(), leaf)
    torch.testing.assert_close(slope.double(), -(2 * wide).exp() / exact, rtol=1e-6, atol=1e-37)
    assert torch.equal(input_scale(torch.tensor([-torch.inf])), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_finite_and_right_as_decays_reach_one(dtype: torch.dtype) -> None:
    """Gates shut so far that log a underflows: no clipping, no NaN; judged by float64 wherever float32 can say the number."""
    gate = torch.tensor([-200.0, -90.0, -60.0, -30.0, -16.0, -8.0, 0.0, 30.0, 200.0, -200.0, -1.0, 1.0])
    found = []
    for wide in (dtype, F64):
        layer = recurrence(wide)
        with torch.no_grad():
            layer.load_state_dict({k: v.to(dtype) for k, v in recurrence(dtype).state_dict().items()})
            layer.recurrence_gate.weight.zero_()
            layer.recurrence_gate.bias.copy_(gate.view(HEADS, -1))
        x = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype).to(wide).requires_grad_()
        y, _ = layer(x, None, None)
        found.append([y, *torch.autograd.grad(y.float().sum() if wide == dtype else y.sum(), [x, *layer.parameters()])])
    tol = 2e-4 if dtype == torch.float32 else 6e-2
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(a).all()
        assert float((a.double() - b).detach().norm()) <= tol * float(b.detach().norm())


def test_states_are_float32_in_low_precision_and_float64_in_float64() -> None:
    for dtype, of_state in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        mixer = block(dtype)
        for t in (1, 7):
            y, state = mixer(torch.randn(2, t, D, dtype=dtype), state=mixer.init_state(2))
            assert y.dtype == dtype
            assert state["rnn"]["h"].dtype == of_state
            assert state["conv"]["window"].dtype == dtype


@torch.no_grad()
def test_a_continued_document_has_no_first_token() -> None:
    """Row 0 goes on, row 1 begins: by its own state's length, and by what segments say."""
    layer = recurrence()
    x, more = torch.randn(2, 5, WIDTH, dtype=F64), torch.randn(2, 4, WIDTH, dtype=F64)
    whole, _ = layer(torch.cat([x, more], 1), None, None)
    fresh, _ = layer(more, None, None)
    used = Segments.from_mask(torch.tensor([[1] * 5, [0] * 5]))
    _, state = layer(x, used, layer.init_state(2))
    assert state is not None
    assert state.length.tolist() == [5, 0]
    for segments in (None, Segments.from_lengths([[4], [4]])):
        y, _ = layer(more, segments, state.clone())
        torch.testing.assert_close(y[0], whole[0, 5:], rtol=0, atol=1e-12)
        torch.testing.assert_close(y[1], fresh[1], rtol=0, atol=1e-12)
    y, _ = layer(more, Segments.from_lengths([[4], [4]], continues=False), state.clone())
    torch.testing.assert_close(y, fresh, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_recurrence_remembers_its_last_tokens_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = RGLRUConfig(n_heads=2, d_inner=6).build(BuildContext(d_model=D, param_dtype=F64))
    calls = []
    scan = mixer.rg_lru.scan.forward
    monkeypatch.setattr(mixer.rg_lru.scan, "forward", lambda *a, **k: (calls.append(1), scan(*a, **k))[1])
    x = torch.randn(3, 9, D, dtype=F64)
    ids = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 2, 2, 0, 2, 0], [0, 0, 1, 1, 0, 1, 1, 1, 0]])
    _, state = mixer(x, segments=Segments.from_ids(ids), state=mixer.init_state(3), keep=4)
    assert len(calls) == 1
    left = crop(state, torch.tensor([4, 3, 2]))
    for row, kept in enumerate(([0, 1, 2, 3, 4], [], [2, 3, 5])):
        _, want = mixer(x[row : row + 1, kept], state=mixer.init_state(1))
        torch.testing.assert_close(left["h"][row], want["h"][0], rtol=0, atol=1e-12)
        assert int(left.length[row]) == len(kept)


@torch.no_grad()
def test_left_pads_do_not_enter_through_the_biases() -> None:
    mixer = block()
    x = torch.randn(1, 6, D, dtype=F64)
    padded = torch.cat([torch.full((1, 5, D), float("nan"), dtype=F64), x], 1)
    y, _ = mixer(padded, segments=Segments.from_mask((torch.arange(11) >= 5)[None]))
    torch.testing.assert_close(y[:, 5:], mixer(x)[0], rtol=0, atol=1e-12)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="rg_lru: a recurrence of 10 channels is not divisible by n_heads = 4"):
        RGLRUConfig(n_heads=4).build(BuildContext(d_model=10))
    with pytest.raises(RecipeError, match=r"a_range = \[0.9, 1.0\] must be two rising numbers between 0 and 1"):
        GriffinRecurrentConfig(n_heads=4, a_range=(0.9, 1.0))
