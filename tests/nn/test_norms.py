from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, Norm, NormConfig, init_parameters
from hybridtf.nn import GatedRMSNorm, GroupNormConfig, L2NormConfig, LayerNormConfig, NoNormConfig, RMSNormConfig
from hybridtf.testing import check_norm
from hybridtf.testing.laws_config import option_variants

CTX = BuildContext(d_model=12, param_dtype=torch.float64)
ALL = [
    RMSNormConfig(), RMSNormConfig(gate_rank=5), RMSNormConfig(bias=True), RMSNormConfig(bias=True, round_first=True),
    RMSNormConfig(unit_offset=True), RMSNormConfig(weight=False), RMSNormConfig(round_first=True),
    LayerNormConfig(), LayerNormConfig(bias=False), LayerNormConfig(weight=False), LayerNormConfig(weight=False, bias=False),
    GroupNormConfig(n_groups=3), GroupNormConfig(n_groups=2, weight=False), GroupNormConfig(n_groups=4, bias=False),
    L2NormConfig(), NoNormConfig(),
]
COMPUTING = ALL[:-1]
KINDS = (RMSNormConfig, LayerNormConfig, GroupNormConfig)


def randomised(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) + 0.5)
    return module


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same_with_gradients(norm, other, x):
    """Outputs and gradients of input and parameters; ``other`` takes (x, *parameters)."""
    results = []
    for function in (norm, lambda z: other(z, *norm.parameters())):
        z = x.clone().requires_grad_()
        y = function(z)
        weights = randn(*y.shape, seed=5)
        results.append((y, *torch.autograd.grad((y * weights).sum(), (z, *norm.parameters()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


SHAPES = [(3, 5, 12), (0, 12), (2, 0, 12), (1, 12)]


def test_a_gate_of_the_normed_row():
    norm = randomised(RMSNormConfig(eps=1e-5, gate_rank=4).build(CTX))

    def by_hand(x, w, down, up):
        y = F.rms_norm(x, (12,), w, 1e-5)
        return y * torch.sigmoid(F.silu(y @ down.T) @ up.T)

    same_with_gradients(norm, by_hand, randn(3, 5, 12))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_torchs(shape):
    norm = randomised(RMSNormConfig(eps=1e-5).build(CTX))
    same_with_gradients(norm, lambda x, w: F.rms_norm(x, (12,), w, 1e-5), randn(*shape))


@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_with_a_bias(weight):
    norm, x = randomised(RMSNormConfig(weight=weight, bias=True).build(CTX)), randn(3, 12)

    def other(z, *params):
        return F.rms_norm(z, (12,), params[0] if weight else None, 1e-6) + params[-1]

    same_with_gradients(norm, other, x)


def test_l2_norm_gives_vectors_of_length_one():
    norm, x = L2NormConfig(eps=1e-15).build(CTX), randn(3, 12)
    same_with_gradients(norm, lambda z: F.normalize(z, dim=-1), x)


def test_rms_norm_without_weight_and_with_unit_offset():
    same_with_gradients(RMSNormConfig(weight=False).build(CTX), lambda x: F.rms_norm(x, (12,), None, 1e-6), randn(3, 12))
    norm = RMSNormConfig(unit_offset=True).build(CTX)
    assert not norm.weight.any()
    same_with_gradients(randomised(norm), lambda x, w: F.rms_norm(x, (12,), 1 + w, 1e-6), randn(3, 12))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm_is_torchs(weight, bias, shape):
    norm = randomised(LayerNormConfig(weight=weight, bias=bias).build(CTX))

    def other(x, *params):
        w = params[0] if weight else None
        return F.layer_norm(x, (12,), w, params[-1] if bias else None, 1e-5)

    same_with_gradients(norm, other, randn(*shape))


@pytest.mark.parametrize("n_groups", [1, 2, 3, 12])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_group_norm_is_torchs_on_single_tokens(n_groups, weight, bias):
    norm = randomised(GroupNormConfig(n_groups=n_groups, weight=weight, bias=bias).build(CTX))

    def other(x, *params):
        w = params[0] if weight else torch.ones(12, dtype=x.dtype)
        return F.group_norm(x.flatten(0, 1), n_groups, w, params[-1] if bias else None, 1e-5).view_as(x)

    same_with_gradients(norm, other, randn(3, 5, 12))
    assert norm(randn(2, 0, 12)).shape == (2, 0, 12)


def test_group_norm_refuses_a_width_that_does_not_divide():
    with pytest.raises(ConfigError, match="width of 12 is not divisible by n_groups = 5"):
        GroupNormConfig(n_groups=5).build(CTX)


def test_options_that_speak_of_no_weight_are_refused():
    for option in ("unit_offset", "round_first"):
        with pytest.raises(ConfigError, match=f"{option} speaks of a weight, and weight = false"):
            RMSNormConfig(weight=False, **{option: True})


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shared_weight", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_norm_over_groups(norm_first, shared_weight, activation):
    norm = GatedRMSNorm(
        CTX, n_groups=3, eps=1e-5, norm_first=norm_first, activation=activation, shared_weight=shared_weight
    )
    randomised(norm)
    assert norm.weight.shape == ((4,) if shared_weight else (12,))
    act = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation]
    gate = randn(2, 7, 12, seed=1)

    def other(y, w):
        inner = y if norm_first else y * act(gate)
        normed = torch.cat([F.rms_norm(part, (4,), None, 1e-5) for part in inner.split(4, -1)], -1)
        normed = normed * (w.repeat(3) if shared_weight else w)
        return normed * act(gate) if norm_first else normed

    results = []
    for function in (lambda y: norm(y, gate), lambda y: other(y, norm.weight)):
        y = randn(2, 7, 12).requires_grad_()
        out = function(y)
        results.append((out, *torch.autograd.grad((out * gate).sum(), (y, norm.weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gated_norm_refuses_groups_that_do_not_divide():
    with pytest.raises(ConfigError, match="width 12 does not divide into 5 groups"):
        GatedRMSNorm(CTX, n_groups=5, eps=1e-5, norm_first=True)


@pytest.mark.parametrize("config", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_rows_give_zeros_and_finite_gradients(config: NormConfig, dtype):
    norm: Norm = config.build(BuildContext(d_model=12, param_dtype=dtype))
    x = torch.zeros(2, 12, dtype=dtype, requires_grad=True)
    y = norm(x)
    assert not y.any()
    y.sum().backward()
    assert x.grad.isfinite().all()
    for p in norm.parameters():
        assert p.grad.isfinite().all()


@pytest.mark.parametrize("config", COMPUTING, ids=repr)
def test_computes_in_float32_and_returns_its_dtype(config):
    norm = config.build(BuildContext(d_model=240)).to(torch.bfloat16)
    x = (torch.randn(4, 240, generator=torch.Generator().manual_seed(0)) * 100 + 1000).to(torch.bfloat16)
    got = norm(x)
    assert got.dtype == torch.bfloat16
    want = config.build(BuildContext(d_model=240))(x.float())
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


def _bf16(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.rand(p.shape, generator=torch.Generator().manual_seed(3)).to(p))
    return module.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2.modeling_gemma2.Gemma2RMSNorm", {"unit_offset": True}),
        ("llama.modeling_llama.LlamaRMSNorm", {"round_first": True}),
        ("olmo2.modeling_olmo2.Olmo2RMSNorm", {}),
    ],
)
def test_bf16_rounds_where_the_published_model_does(name, options):
    pytest.importorskip("transformers", reason="parity needs transformers")
    module, cls = name.rsplit(".", 1)
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), cls)
    reference = _bf16(theirs(240, eps=1e-6))
    norm = RMSNormConfig(**options).build(BuildContext(d_model=240, param_dtype=torch.bfloat16))
    norm.load_state_dict(reference.state_dict())
    x = torch.randn(64, 240, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(norm(x), reference(x))
    other = RMSNormConfig(**({} if options.get("round_first") else {**options, "round_first": True}))
    swapped = other.build(BuildContext(d_model=240, param_dtype=torch.bfloat16))
    swapped.load_state_dict(reference.state_dict())
    assert not torch.equal(swapped(x), reference(x))


def test_rounding_once_is_nearer_to_the_truth():
    x = torch.randn(64, 240, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    errors = []
    for round_first in (False, True):
        norm = _bf16(RMSNormConfig(round_first=round_first).build(BuildContext(d_model=240)))
        exact = F.rms_norm(x.double(), (240,), norm.weight.double(), 1e-6)
        errors.append(float((norm(x).detach().double() - exact.detach()).abs().mean()))
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("config", [c for cls in KINDS for _, c in option_variants(cls.tiny())], ids=repr)
def test_every_option_keeps_the_laws(config):
    check_norm(config, laws=("shape", "empty", "per_token", "gradients", "init", "meta", "save_load", "bf16"))


def test_a_unit_offset_weight_can_end_a_residual_branch():
    norm = RMSNormConfig(unit_offset=True).build(CTX)
    spec = norm.param_specs()["weight"]
    norm.param_specs = lambda: {"weight": replace(spec, residual=True)}
    for scale in (0.25, 0.0):
        init_parameters(norm, 0, residual_scale=scale)
        x = randn(3, 12)
        torch.testing.assert_close(norm(x), scale * F.rms_norm(x, (12,), None, 1e-6))


def test_norms_do_not_mix_tokens():
    x = randn(2, 7, 12)
    for config in ALL:
        norm = randomised(config.build(CTX))
        torch.testing.assert_close(norm(x)[:, 3], norm(x[:, 3]), rtol=0, atol=1e-15)
