"""The delta rule family against transformers' layers and fla's references: results, final memories and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import DeltaNetConfig, GatedDeltaNetConfig, GatedDeltaProductConfig, KDAConfig
from tests.peers import peer

D, T = 20, 13
Params = dict[str, Tensor]


def redrawn(module: nn.Module) -> nn.Module:
    """In float64, with no parameter left at 0 or 1; steps and rates stay of a size that matters."""
    gen = torch.Generator().manual_seed(3)
    module = module.to(torch.float64)
    with torch.no_grad():
        for name, p in module.named_parameters():
            low, high = (0.5, 1.5) if "norm" in name else (-1.5, 1.0) if p.ndim == 1 or "A_log" in name else (-0.6, 0.6)
            p.copy_(torch.rand(p.shape, generator=gen, dtype=torch.float64) * (high - low) + low)
    return module


def layer_of(model: str, name: str, config: object) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    with StrictFloat64():
        return redrawn(getattr(module, name)(config, 0))


def of_conv(weight: Tensor, key: int, value: int) -> Params:
    q, k, v = weight.squeeze(1).split([key, key, value])
    return {"conv.q.weight": q, "conv.k.weight": k, "conv.v.weight": v}


def renamed(p: Params, **names: str) -> Params:
    return {f"{ours}.weight": p[f"{theirs}.weight"] for ours, theirs in names.items()}


def qwen3_next():
    g, h, k, v = 2, 6, 4, 3
    config = transformers.Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=4, linear_num_key_heads=g, linear_num_value_heads=h, linear_key_head_dim=k,
        linear_value_head_dim=v, rms_norm_eps=1e-4,
    )

    def ours(p: Params) -> Params:
        q, k_, v_, z = p["in_proj_qkvz.weight"].view(g, -1, D).split([k, k, h // g * v, h // g * v], 1)
        b, a = p["in_proj_ba.weight"].view(g, -1, D).split([h // g] * 2, 1)
        named = {"q_proj": q, "k_proj": k_, "v_proj": v_, "gate_proj": z, "b_proj": b, "a_proj": a}
        return {
            **{f"{name}.weight": w.flatten(0, 1) for name, w in named.items()}, **of_conv(p["conv1d.weight"], g * k, h * v),
            **renamed(p, norm="norm", out_proj="out_proj"), "A_log": p["A_log"], "dt_bias": p["dt_bias"],
        }

    mixer = GatedDeltaNetConfig(n_heads=g, n_v_heads=h, head_dim=k, v_dim=v, eps=1e-4, chunk_size=8)
    return layer_of("qwen3_next", "Qwen3NextGatedDeltaNet", config), mixer, ours


def olmo_hybrid():
    g, h, k, v = 2, 4, 3, 5
    config = transformers.OlmoHybridConfig(
        hidden_size=D, num_hidden_layers=4, num_attention_heads=4, linear_num_key_heads=g, linear_num_value_heads=h,
        linear_key_head_dim=k, linear_value_head_dim=v,
    )

    def ours(p: Params) -> Params:
        names = {"gate_proj": "g_proj", "norm": "o_norm", "out_proj": "o_proj"}
        same = {name: name for name in ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")}
        conv = of_conv(p["conv1d.weight"], g * k, h * v)
        return {**renamed(p, **same, **names), **conv, "A_log": p["A_log"], "dt_bias": p["dt_bias"]}

    mixer = GatedDeltaNetConfig(n_heads=g, n_v_heads=h, head_dim=k, v_dim=v, allow_neg_eigval=True, chunk_size=8)
    return layer_of("olmo_hybrid", "OlmoHybridGatedDeltaNet", config), mixer, ours


def of_kda(p: Params, width: int, **names: str) -> Params:
    same = {name: name for name in ("q_proj", "k_proj", "v_proj", "b_proj")}
    return {
        **renamed(p, **same, **names, norm="o_norm", out_proj="o_proj"), **of_conv(p["conv1d.weight"], width, width),
        "A_log": p["forget_gate.A_log"].flatten(), "dt_bias": p["forget_gate.dt_bias"],
    }


def kimi_linear():
    config = transformers.KimiLinearConfig(
        hidden_size=D, num_hidden_layers=4, linear_head_dim=4, linear_num_heads=3, rms_norm_eps=1e-4,
    )
    names = {"gate_proj.down_proj": "g_a_proj", "gate_proj.up_proj": "g_b_proj"}
    names |= {"decay_proj.down_proj": "forget_gate.f_a_proj", "decay_proj.up_proj": "forget_gate.f_b_proj"}
    mixer = KDAConfig(n_heads=3, head_dim=4, eps=1e-4, chunk_size=8)
    return layer_of("kimi_linear", "KimiLinearDeltaAttention", config), mixer, lambda p: of_kda(p, 12, **names)


def bailing_hybrid():
    config = transformers.BailingHybridConfig(hidden_size=D, num_hidden_layers=4, num_attention_heads=3, head_dim=4)
    names = {"gate_proj": "g_proj", "decay_proj": "forget_gate.f_proj"}
    mixer = KDAConfig(n_heads=3, head_dim=4, eps=config.rms_norm_eps, chunk_size=8, low_rank=False, decay_floor=-5.0)
    return layer_of("bailing_hybrid", "BailingHybridDeltaAttention", config), mixer, lambda p: of_kda(p, 12, **names)


@pytest.mark.parametrize("case", [qwen3_next, olmo_hybrid, kimi_linear, bailing_hybrid])
def test_equals_the_layer_of_transformers(case: Callable[[], tuple]) -> None:
    layer, config, ours = case()
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64))
    theirs = dict(layer.named_parameters())
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, D, generator=gen, dtype=torch.float64, requires_grad=True)
    with StrictFloat64():
        want = layer(x)
    mapped = ours(theirs)
    assert set(mapped) == {name for name, _ in mixer.named_parameters()}
    found, _ = torch.func.functional_call(mixer, mapped, (x,))
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
    weight = torch.randn(want.shape, generator=gen, dtype=torch.float64)
    grads = [torch.autograd.grad((y * weight).sum(), [x, *theirs.values()]) for y in (found, want)]
    for name, a, b in zip(["x", *theirs], *grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def convolved(mixer: nn.Module, x: Tensor) -> list[Tensor]:
    """Queries, keys and values after their convolutions, by torch's own."""
    out = []
    for name in ("q", "k", "v"):
        w = getattr(mixer.conv, name).weight
        y = getattr(mixer, f"{name}_proj")(x).mT
        out.append(F.silu(F.conv1d(F.pad(y, (w.shape[1] - 1, 0)), w[:, None], groups=w.shape[0]).mT))
    return out


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def of_delta_rule(mixer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    recur = peer("fla/ops/delta_rule/naive.py").delta_rule_recurrence
    q, k, v = (z.unflatten(-1, (3, -1)).transpose(1, 2) for z in convolved(mixer, x))
    beta = mixer.b_proj(x).sigmoid().mT * (2 if mixer.config.allow_neg_eigval else 1)
    y, state = recur(unit(q), unit(k), v, beta)
    return y.transpose(1, 2), state


def of_delta_product(mixer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    recur = peer("fla/ops/gated_delta_product/naive.py").naive_recurrent_gated_delta_product
    config, n = mixer.config, mixer.config.n_householder
    q, k, v = convolved(mixer, x)
    q = unit(q.unflatten(-1, (3, -1)))
    k, v = (z.unflatten(-1, (n, 3, -1)).flatten(1, 2) for z in (k, v))
    beta = mixer.b_proj(x).sigmoid().unflatten(-1, (n, 3)).flatten(1, 2) * (2 if config.allow_neg_eigval else 1)
    g = -mixer.A_log.exp() * F.softplus(mixer.a_proj(x) + mixer.dt_bias) if config.forget_gate else None
    return recur(q, unit(k), v, g, beta, q.shape[-1] ** -0.5, num_householder=n)


def normed(mixer: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    y = y / (y.square().mean(-1, keepdim=True) + mixer.config.eps).sqrt() * mixer.norm.weight
    gate = F.silu(mixer.gate_proj(x)) if mixer.config.output_gate else 1.0
    return mixer.out_proj(y.flatten(-2) * gate)


@pytest.mark.parametrize(
    ("config", "recur"),
    [
        (DeltaNetConfig(n_heads=3, head_dim=4, v_dim=5, chunk_size=8), of_delta_rule),
        (DeltaNetConfig(n_heads=3, head_dim=4, d_conv=3, output_gate=True, allow_neg_eigval=True, chunk_size=5), of_delta_rule),
        (GatedDeltaProductConfig(n_heads=3, head_dim=4, v_dim=5, chunk_size=8), of_delta_product),
        (
            GatedDeltaProductConfig(
                n_heads=3, head_dim=4, n_householder=3, forget_gate=False, output_gate=False, allow_neg_eigval=False,
            ),
            of_delta_product,
        ),
    ],
)
def test_equals_the_references_of_fla(config, recur) -> None:
    """Projections, convolutions and norms are spelled out here; the recurrence is fla's own."""
    mixer = redrawn(config.build(BuildContext(d_model=D)))
    mixer = mixer.to(torch.float64)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, D, generator=gen, dtype=torch.float64, requires_grad=True)
    with StrictFloat64():
        y, state = recur(mixer, x)
    want = normed(mixer, y, x)
    found, after = mixer(x, state=mixer.init_state(2))
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(after["memory"]["S"], state, rtol=1e-11, atol=1e-11)
    params = dict(mixer.named_parameters())
    weight = torch.randn(want.shape, generator=gen, dtype=torch.float64)
    grads = [torch.autograd.grad((y * weight).sum(), [x, *params.values()]) for y in (found, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_decays_start_where_the_papers_say() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ctx = BuildContext(d_model=256, param_dtype=dtype)
        for config, low in (
            (GatedDeltaNetConfig(n_heads=64), 0.0), (KDAConfig(n_heads=64, head_dim=4), 0.99),
            (GatedDeltaProductConfig(n_heads=64), 0.0),
        ):
            mixer = config.build(ctx)
            steps, rates = F.softplus(mixer.dt_bias.detach().float()), mixer.A_log.detach().float().exp()
            assert 0.0009 < float(steps.min()) < 0.003
            assert 0.03 < float(steps.max()) < 0.11
            assert low < float(rates.min()) < 2.5
            assert 14 < float(rates.max()) < 16.1
    one = GatedDeltaNetConfig(n_heads=2, dt_range=(1.3133, 1.3133)).build(ctx)
    assert float(one.dt_bias.detach()[0]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("neg", [False, True])
def test_rates_reach_two_only_where_asked(neg: bool) -> None:
    """With b = 2 a key turns its value round; the memory that is read must then be that of -1 times the value."""
    config = DeltaNetConfig(n_heads=1, head_dim=4, allow_neg_eigval=neg)
    mixer = config.build(BuildContext(d_model=4, param_dtype=torch.float64))
    with torch.no_grad():
        mixer.b_proj.weight.fill_(1e3)
        x = torch.full((1, 1, 4), 0.7, dtype=torch.float64)
        first = mixer(x, state=mixer.init_state(1))[1]["memory"]["S"]
        _, k, v = convolved(mixer, x)
    torch.testing.assert_close(first[0, 0], (2 if neg else 1) * unit(k)[0, 0, :, None] * v[0, 0], rtol=1e-9, atol=1e-12)


def test_published_widths() -> None:
    mixer = GatedDeltaNetConfig(n_heads=6).build(BuildContext(d_model=64))
    sizes = {name: tuple(p.shape) for name, p in mixer.named_parameters()}
    assert sizes["q_proj.weight"] == sizes["k_proj.weight"] == (48, 64)
    assert sizes["v_proj.weight"] == sizes["gate_proj.weight"] == (96, 64)
    assert sizes["norm.weight"] == (16,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedDeltaNetConfig(n_heads=4, n_v_heads=6), "n_v_heads = 6 is not a multiple of n_heads = 4"),
        (lambda: KDAConfig(n_heads=2, a_range=(0.0, 1.0)), "a_range"),
        (lambda: GatedDeltaNetConfig(n_heads=2, output_gate=False, gate_activation="sigmoid"), "beside output_gate = false"),
        (lambda: DeltaNetConfig(n_heads=3).build(BuildContext(d_model=20)), "d_model / n_heads = 6.66667"),
        (lambda: GatedDeltaNetConfig(n_heads=4).build(BuildContext(d_model=20)), r"0.75 \* d_model / n_heads = 3.75"),
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises((ConfigError, RecipeError), match=message):
        make()
