"""``moe`` against a loop over tokens, and what a batch must not do to a token; routing, options, decoding, precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from hybridtf.channel_mixers import GLUConfig, MoEConfig
from hybridtf.channel_mixers.moe.routing import RouterOptions, route
from hybridtf.core import BuildContext, ConfigError, Segments, active, param_specs
from hybridtf.cost import count_flops
from hybridtf.nn import activation

D = 8
BASE = {"n_experts": 6, "top_k": 2, "d_ff": 12}
FORMS = {
    "softmax": {}, "not normalised": {"normalize": False}, "softmax over the chosen": {"scores": "softmax_top_k"},
    "sigmoid": {"scores": "sigmoid", "routed_scale": 2.5}, "selection bias": {"scores": "sigmoid", "selection_bias": "fixed"},
    "selection bias on logits": {"scores": "softmax_top_k", "selection_bias": "balanced"},
    "groups by max": {"n_groups": 3, "top_k_groups": 2},
    "groups by two": {"n_groups": 2, "top_k_groups": 1, "group_score": "top2", "scores": "sigmoid"},
    "every expert": {"top_k": 6}, "one expert": {"n_experts": 1, "top_k": 1}, "top 1": {"top_k": 1, "normalize": False},
    "plain": {"gated": False, "activation": "relu2"}, "biases": {"bias": True, "router_bias": True, "d_ff_shared": 4},
    "clamped": {"activation": "quick_gelu", "limit": 0.5, "up_shift": 1.0, "bias": True, "d_ff_shared": 4},
    "clamped, but for the shared": {"limit": 0.4, "d_ff_shared": 4, "limit_shared": False},
    "weights on the input": {"weights_on": "input", "bias": True}, "shared and gated": {"d_ff_shared": 5, "shared_gate": True},
    "latent": {"d_latent": 4, "bias": True},
    "scaled gate": {"gate_scale": 0.7, "d_ff_shared": 4},
    "biases outside": {"d_latent": 4, "d_ff_shared": 5, "outer_bias": True},
    "none outside": {"bias": True, "d_ff_shared": 5, "outer_bias": False},
    "norms and scales": {
        "router_norm": {"type": "rms_norm"}, "expert_norm": {"type": "layer_norm"}, "expert_scale": True, "logit_scale": 0.4,
        "d_ff_shared": 4,
    },
    "two that always serve": {"n_always": 2, "scores": "sigmoid", "selection_bias": "fixed", "routed_scale": 1.5},
    "two that always serve, and groups": {"n_always": 2, "n_groups": 2, "top_k_groups": 1},
    "root of softplus": {"scores": "sqrt_softplus", "selection_bias": "fixed", "routed_scale": 1.5},
    "two that give back": {"n_identity": 2, "normalize": False, "selection_bias": "fixed", "top_k": 3, "d_ff_shared": 4},
    "three that give back a latent": {"n_identity": 3, "d_latent": 4, "weights_on": "input", "n_groups": 3, "top_k_groups": 2},
}


def build(dtype=torch.float64, seed=0, **options):
    config = MoEConfig(**{**BASE, **options})
    mixer = config.build(BuildContext(d_model=D, param_dtype=dtype, seed=seed))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            if name.endswith(("bias", "router.weight", "expert_scale", "norm.weight")):
                param.copy_(0.7 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return mixer


def data(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(config, gate, up, bounded=True):
    if not config.gated:
        return activation(config.activation)(up)
    gate = gate * config.gate_scale
    if config.limit and bounded:
        gate, up = gate.clamp(max=config.limit), up.clamp(min=-config.limit, max=config.limit)
    return activation(config.activation)(gate) * (up + config.up_shift)


def chosen_by_hand(config, logits, bias):
    """Experts of one token, best first, by sorting in Python."""
    routed = config.n_experts + config.n_identity - config.n_always
    scores = {"softmax": logits.softmax(0), "softmax_top_k": logits, "sigmoid": logits.sigmoid()}
    compared = scores[config.scores] if config.scores in scores else (1 + logits.exp()).log().sqrt()
    wanted = (compared[:routed] if bias is None else compared[:routed] + bias).tolist()
    size = routed // config.n_groups
    groups = [sorted(wanted[g * size : (g + 1) * size], reverse=True) for g in range(config.n_groups)]
    worth = [sum(group[: 2 if config.group_score == "top2" else 1]) for group in groups]
    allowed = sorted(range(config.n_groups), key=lambda g: -worth[g])[: config.top_k_groups]
    experts = [e for e in range(routed) if e // size in allowed]
    best = sorted(experts, key=lambda e: -wanted[e])[: config.top_k]
    return [*best, *range(routed, routed + config.n_always)], compared


def by_token(mixer, x):
    """One token and one expert after the other, under autograd."""
    config, experts = mixer.config, mixer.experts
    rows = []
    for token in x.flatten(0, 1).unbind(0):
        bias = None if mixer.selection is None else mixer.selection.bias
        logits = mixer.router(token if mixer.router_norm is None else mixer.router_norm(token)) * config.logit_scale
        chosen, scores = chosen_by_hand(config, logits, bias)
        weights = scores[chosen]
        if config.scores == "softmax_top_k":
            weights = weights.softmax(0)
        elif config.normalize:
            weights = weights / weights.sum()
        weights = weights if mixer.expert_scale is None else weights * mixer.expert_scale[chosen]
        read = token if mixer.expert_norm is None else mixer.expert_norm(token)
        inner = mixer.latent_in(read) if config.d_latent else read
        total = torch.zeros_like(inner)
        for e, weight in zip(chosen, (weights * config.routed_scale).unbind(0), strict=True):
            if e >= config.n_experts:
                total = total + weight * inner
                continue

            def project(h, name, e=e):
                b = getattr(experts, f"{name}_bias")
                return h @ getattr(experts, name)[e] + (0 if b is None else b[e])

            given = inner * weight if config.weights_on == "input" else inner
            gate = project(given, "gate_proj") if config.gated else None
            y = project(unit(config, gate, project(given, "up_proj")), "down_proj")
            total = total + (y if config.weights_on == "input" else weight * y)
        total = mixer.latent_out(total) if config.d_latent else total
        if mixer.shared is not None:
            s = mixer.shared
            extra = s.down_proj(unit(config, s.gate_proj(token), s.up_proj(token), config.limit_shared))
            total = total + (extra if mixer.shared_gate is None else mixer.shared_gate(token).sigmoid() * extra)
        rows.append(total)
    return torch.stack(rows).view(x.shape)


def with_gradients(fn, mixer, x):
    x = x.clone().requires_grad_()
    y = fn(x)
    params = [p for p in mixer.parameters() if p.requires_grad]
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y)
    found = torch.autograd.grad((y * probe).sum(), [x, *params], allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(found, [x, *params], strict=True))]


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS.keys())
def test_against_a_loop_over_tokens(options):
    mixer, x = build(**options), data(2, 7)
    pairs = zip(with_gradients(lambda v: mixer(v)[0], mixer, x), with_gradients(lambda v: by_token(mixer, v), mixer, x),
                strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("options", "count"), [({}, 2), ({"top_k": 6}, 6), ({"n_experts": 1, "top_k": 1}, 1)])
def test_one_token_reads_only_the_experts_it_chose(options, count):
    mixer, x = build(**options), data(1, 1)
    want = mixer(x)[0]
    chosen = route(mixer.router(x[0]), mixer.config, None).experts[0].tolist()
    assert len(chosen) == len(set(chosen)) == count
    with torch.no_grad():
        for name in mixer.experts.widths:
            for e in set(range(mixer.config.n_experts)) - set(chosen):
                getattr(mixer.experts, name)[e] = float("nan")
        torch.testing.assert_close(mixer(x)[0], want, rtol=1e-12, atol=1e-14)  # a step without gradients takes other products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_without_tokens_get_a_gradient_of_zero(dtype):
    mixer = build(dtype)
    with torch.no_grad():
        mixer.router.weight[:, :] = 0
        mixer.router.weight[1:3, 0] = torch.tensor([5.0, 4.0], dtype=dtype)
    x = data(1, 20, dtype=dtype)
    x[..., 0] = 1
    mixer(x)[0].square().sum().backward()
    used = mixer.experts.up_proj.grad.flatten(1).any(1).tolist()
    assert used == [False, True, True, False, False, False]


def test_ties_choose_different_experts_and_the_same_for_every_token():
    mixer = build(router_bias=True)
    with torch.no_grad():
        mixer.router.weight.zero_()
        mixer.router.bias.zero_()
    y = mixer(data(1, 1).expand(3, 4, D))[0]
    torch.testing.assert_close(y, y[:1, :1].expand_as(y), rtol=1e-12, atol=1e-12)
    for k in (1, 2, 5, 6):
        options = RouterOptions(n_experts=6, top_k=k, normalize=False)
        assert all(len(set(row)) == k for row in route(torch.zeros(4, 6), options, None).experts.tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_pads_hold_reaches_nothing(dtype):
    mixer = build(dtype, balance_loss=1.0, z_loss=1.0, d_ff_shared=4, selection_bias="balanced").train()
    ids = torch.tensor([[0, 1, 1, 0, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3, 3]])
    segments, x = Segments.from_ids(ids), data(3, 7, dtype=dtype)
    results = []
    for fill in (0.0, float("nan")):
        v = x.masked_fill((ids == 0)[..., None], fill).requires_grad_()
        mixer.zero_grad()
        y, _, extras = mixer(v, segments=segments)
        (y[ids > 0].square().sum() + sum(total for total, _ in extras.losses.values())).backward()
        grads = [p.grad.clone() for p in mixer.parameters() if p.requires_grad]
        load = mixer.selection.load.clone()
        mixer.selection.load.zero_()
        results.append([y, v.grad, load, *grads, *(t for pair in extras.losses.values() for t in pair)])
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert int(results[0][2].sum()) == 2 * int((ids > 0).sum())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_tokens(shape, packed):
    mixer = build(balance_loss=1.0, z_loss=1.0, d_ff_shared=3, selection_bias="balanced").train()
    x = data(*shape).requires_grad_()
    y, _, extras = mixer(x, segments=Segments.from_ids(torch.zeros(shape, dtype=torch.int64)) if packed else None)
    assert y.shape == x.shape
    total = y.sum() + sum(value for value, _ in extras.losses.values())
    total.backward()
    assert float(total.detach()) == 0
    assert not mixer.experts.up_proj.grad.any()


def test_one_expert_is_a_dense_unit():
    mixer = build(n_experts=1, top_k=1)
    dense = GLUConfig(d_ff=12).build(BuildContext(d_model=D, param_dtype=torch.float64))
    with torch.no_grad():
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(dense, name).weight.copy_(getattr(mixer.experts, name)[0].T)
    x = data(2, 5)
    torch.testing.assert_close(mixer(x)[0], dense(x)[0], rtol=1e-12, atol=1e-12)


def test_the_router_works_in_float32_at_least():
    low = build(torch.bfloat16)
    x = data(2, 9, dtype=torch.bfloat16)
    want = x.float().flatten(0, 1) @ low.router.weight.float().T
    torch.testing.assert_close(low._logits(x.flatten(0, 1)), want, rtol=1e-6, atol=1e-6)
    wide = build(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = wide._logits(x.float().flatten(0, 1))
        y = wide(x.float())[0]
    torch.testing.assert_close(logits, F.linear(x.float().flatten(0, 1), wide.router.weight), rtol=1e-6, atol=1e-6)
    exact = wide(x.float())[0]
    assert y.dtype == torch.float32
    assert 1e-6 < (y - exact).norm() / exact.norm() < 2e-2
    assert low(x)[0].dtype == torch.bfloat16


def test_a_float32_model_uses_the_grouped_product_and_agrees_with_float64():
    wide = MoEConfig(**{**BASE, "d_ff": 16}).build(BuildContext(d_model=D, param_dtype=torch.float64))
    narrow = copy.deepcopy(wide).float()
    assert {narrow.experts.linear.chosen[phase, torch.float32] for phase in ("train", "decode")} == {"grouped"}
    assert wide.experts.linear.chosen["train", torch.float64] == "blocks"
    torch.testing.assert_close(narrow(data(3, 50).float())[0].double(), wide(data(3, 50))[0], rtol=1e-4, atol=1e-5)


def test_only_active_experts_are_counted():
    mixer, x = build(n_experts=6, top_k=2, d_ff_shared=5), data(3, 4)
    n = 12
    want = 2 * n * D * 6 + 2 * n * 2 * 3 * D * 12 + 2 * n * 3 * D * 5
    with torch.no_grad():
        assert count_flops(lambda: mixer(x)) == want
    total = sum(p.numel() for p in mixer.parameters())
    assert total - mixer.idle_parameters() == 6 * D + 2 * 3 * D * 12 + 3 * D * 5


def test_roles_and_start():
    mixer = MoEConfig(**{**BASE, "d_ff": 400, "bias": True}).build(BuildContext(d_model=100))
    specs = param_specs(mixer)
    assert {specs[f"experts.{n}"].role for n in mixer.experts.widths} == {"matrix"} == {specs["router.weight"].role}
    assert [n for n, spec in specs.items() if spec.residual] == ["experts.down_proj"]
    for name, (d_in, _) in mixer.experts.widths.items():
        assert abs(float(getattr(mixer.experts, name).detach().std()) * d_in**0.5 - 1) < 0.02
    latent = MoEConfig(**BASE, d_latent=4).build(BuildContext(d_model=D))
    assert [n for n, s in param_specs(latent).items() if s.residual] == ["latent_out.weight"]


def test_compile_serves_other_loads_with_one_graph():
    mixer = build(balance_loss=1.0, z_loss=1.0, selection_bias="balanced").train()
    counter = CompileCounter()
    compiled = torch.compile(lambda v, s: mixer(v, segments=s), backend=counter, fullgraph=True)
    ids = torch.tensor([[1, 1, 0, 2, 2], [0, 3, 3, 3, 3]])
    for seed in (1, 2, 3):
        x = data(2, 5, seed=seed)
        got, want = compiled(x, Segments.from_ids(ids)), mixer(x, segments=Segments.from_ids(ids))
        torch.testing.assert_close(got[0], want[0])
        for name, pair in want[2].losses.items():
            torch.testing.assert_close(got[2].losses[name], pair)
    assert counter.frame_count == 1
    assert int(mixer.selection.load.sum()) == 3 * 2 * 2 * 8
    torch._dynamo.reset()


def test_only_what_is_chosen_counts_as_load():
    mixer = build(n_always=2, scores="sigmoid", selection_bias="balanced").train()
    assert mixer.selection.load.shape == (4,)
    mixer(data(2, 5), segments=Segments.from_lengths([[5], [3]]))
    assert int(mixer.selection.load.sum()) == 2 * 8
    expert = sum(p.numel() for p in mixer.experts.parameters()) // 6
    assert mixer.idle_parameters() == 2 * expert


def test_what_gives_back_costs_nothing_and_pads_are_not_given_back():
    mixer = build(n_identity=2, top_k=2, router_bias=True, normalize=False)
    with torch.no_grad():
        mixer.router.bias.copy_(torch.tensor([0.0] * 6 + [99.0, 98.0]))
    x, segments = data(2, 5), Segments.from_lengths([[5], [3]])
    y = mixer(x, segments=segments)[0]
    torch.testing.assert_close(y[0], mixer.router(x[0]).softmax(-1)[:, 6:].sum(-1, keepdim=True) * x[0])
    assert not y[1, 3:].any()
    assert mixer.idle_parameters() == sum(p.numel() for p in mixer.experts.parameters()) // 6 * 4


def test_the_root_of_softplus_has_a_gradient_where_it_is_nothing():
    logits = torch.tensor([[-200.0, -104.0, 0.0, 50.0]], requires_grad=True)
    options = RouterOptions(n_experts=4, top_k=4, scores="sqrt_softplus", normalize=False)
    routing = route(logits, options, None)
    routing.weights.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert float(routing.weights.detach().max()) == pytest.approx(50**0.5)


@pytest.mark.parametrize(("options", "message"), [
    ({"top_k": 7}, "top_k = 7 is more than the 6 experts"), ({"n_groups": 4}, "not divisible by n_groups = 4"),
    ({"n_groups": 2, "top_k_groups": 3}, "top_k_groups = 3 is more than n_groups = 2"),
    ({"n_groups": 6, "top_k_groups": 1}, "top_k = 2 is more than the 1 experts"),
    ({"n_groups": 6, "top_k_groups": 2, "group_score": "top2"}, "groups of two"),
    ({"top_k": 1}, "the router no gradient"), ({"shared_gate": True}, "give d_ff_shared"),
    ({"n_always": 5}, "top_k = 2 is more than the 1 experts"), ({"n_always": 6}, "n_experts - n_always = 0 is not"),
    ({"n_always": 1, "n_groups": 2}, "n_experts - n_always = 5 is not divisible by n_groups = 2"),
    ({"n_always": 2, "balance_loss": 0.1}, "with n_always some are not"),
    ({"n_always": 2, "n_identity": 2}, "both of the last experts"), ({"n_identity": 3, "top_k": 10}, "than the 9 experts"),
    ({"choice": "token_id", "selection_bias": "fixed"}, "choice = 'token_id' looks it up"),
    ({"choice": "token_id", "balance_loss": 0.1}, "balance_loss is .* looks them up"),
    ({"outer_bias": True}, "give d_ff_shared or d_latent"),
    ({"gated": False, "limit": 2.0}, "are of gated experts"), ({"scores": "softmaxx"}, "Did you mean 'softmax'"),
])
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**{**BASE, **options})


def test_presets():
    make = active()["channel_mixers"].make
    assert make({"type": "mixtral_moe", **BASE}) == MoEConfig(**BASE)
    assert make({"type": "switch_moe", "n_experts": 4, "d_ff": 8}).top_k == 1
    deepseek = make({"type": "deepseek_moe", **BASE})
    assert (deepseek.scores, deepseek.selection_bias, deepseek.group_score) == ("sigmoid", "balanced", "top2")
    assert make({"type": "gpt_oss_moe", **BASE}).limit == 7.0
