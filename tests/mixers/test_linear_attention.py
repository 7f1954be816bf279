from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments
from hybridtf.mixers import LinearAttentionConfig
from hybridtf.nn import FEATURE_MAPS, RMSNormConfig, RopeConfig
from hybridtf.testing import Subject, run_checks
from hybridtf.testing.laws_outside import check_compile

D = 12
F64 = torch.float64


def build(dtype=F64, **options):
    options = {"n_heads": 4, "head_dim": 4, "v_dim": 3, "chunk_size": 4, **options}
    return LinearAttentionConfig(**options).build(BuildContext(d_model=D, param_dtype=dtype)).eval()


def weights_of(config, q, k, scale):
    """(h t s) by the definition of each map: q, k (h t n)."""
    s = q @ k.mT
    maps = {
        "elu1": lambda: scale * (F.elu(q) + 1) @ (F.elu(k) + 1).mT,
        "relu": lambda: scale * q.relu() @ k.relu().mT,
        "identity": lambda: scale * s,
        "taylor": lambda: 1 + scale * s + (scale * s) ** 2 / 2,
    }
    return maps[config.feature_map]()


def by_hand(mixer, x):
    """One document (t d) with every pair of tokens written out."""
    config, t = mixer.config, len(x)
    h, g, n, p = config.n_heads, config.n_kv_heads or config.n_heads, mixer.head_dim, mixer.v_dim
    q, k, v = mixer.q_proj(x).view(t, h, n), mixer.k_proj(x).view(t, g, n), mixer.v_proj(x).view(t, g, p)
    if mixer.position is not None:
        table = mixer.position.table(torch.arange(t)[None], q.dtype)
        q, k = (mixer.position(z[None], table)[0] for z in (q, k))
    k, v = (z.repeat_interleave(h // g, 1) for z in (k, v))
    scale = config.scale or n**-0.5
    w = weights_of(config, q.transpose(0, 1), k.transpose(0, 1), scale)
    decay = {"none": [1.0] * g, "retnet": [1 - 2.0 ** (-5 - i) for i in range(g)]}.get(config.decay, config.decay)
    decay = torch.tensor(decay, dtype=x.dtype).repeat_interleave(h // g)[:, None, None]
    steps = torch.arange(t)[:, None] - torch.arange(t)
    w = w * decay ** steps.clamp(min=0) * (steps >= 0)
    if config.normaliser:
        total = w.sum(-1, keepdim=True) + config.eps
        w = torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))
    y = (w @ v.transpose(0, 1)).transpose(0, 1)
    y = (y if mixer.output_norm is None else mixer.output_norm(y)).flatten(1)
    if mixer.gate_proj is not None:
        y = y * F.silu(mixer.gate_proj(x))
    return mixer.out_proj(y)


OPTIONS = [
    {}, {"feature_map": "relu"}, {"feature_map": "taylor"}, {"feature_map": "identity", "normaliser": False},
    {"normaliser": False}, {"feature_map": "taylor", "normaliser": False, "scale": 0.7}, {"n_kv_heads": 2}, {"n_kv_heads": 1},
    {"n_kv_heads": 2, "decay": (0.5, 0.9), "feature_map": "taylor"}, {"decay": "retnet"}, {"decay": (1.0, 0.1, 0.7, 0.99)},
    {"eps": 0.1, "scale": 1.0}, {"position": RopeConfig()}, {"position": RopeConfig(), "feature_map": "relu", "n_kv_heads": 2},
    {"head_dim": None, "v_dim": None, "qkv_bias": True, "out_bias": True}, {"head_dim": 1, "feature_map": "taylor"},
    {
        "feature_map": "identity", "normaliser": False, "decay": "retnet", "position": RopeConfig(),
        "output_norm": RMSNormConfig(), "output_gate": True,
    },
]


@pytest.mark.parametrize("t", [1, 4, 11])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}"[:24] for k, v in o.items()) or "plain")
def test_forward_and_gradients_equal_all_pairs_written_out(options, t):
    mixer = build(**options)
    x = torch.randn(t, D, dtype=F64, requires_grad=True)
    weight = torch.randn(t, D, dtype=F64)
    got, want = mixer(x[None])[0][0], by_hand(mixer, x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    params = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[8], OPTIONS[13], OPTIONS[-1]])
def test_documents_pads_and_cuts(options):
    """Packed and padded rows, in pieces, against each document by all its pairs; what pads hold does not matter."""
    mixer = build(**options)
    ids = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 2, 2, 3, 0, 3, 3], [4] * 7 + [0] * 6, [0] * 13])
    segments = Segments.from_ids(ids)
    x = torch.randn(3, 13, D, dtype=F64)
    x = torch.where(ids[..., None] == 0, 1e6, x)
    for cut in ((13,), (1,) * 13, (4, 1, 8)):
        state, parts, at = mixer.init_state(3), [], 0
        for size in cut:
            y, state = mixer(x[:, at : at + size], segments=segments.narrow(at, at + size), state=state)
            parts.append(y)
            at += size
        y = torch.cat(parts, 1)
        for row in range(2):
            for document in set(ids[row].tolist()) - {0}:
                where = ids[row] == document
                torch.testing.assert_close(y[row, where], by_hand(mixer, x[row, where]), rtol=1e-9, atol=1e-9)
        assert state.length.tolist() == [3, 7, 0]
        assert not state["S"][2].any()


def test_equals_the_equation_of_fast_transformers():
    """Their causal linear attention: Q, K = elu + 1; V_new = sum Q K^T V / (Q . cumsum(K) + eps)."""
    mixer = build(scale=1.0, eps=1e-6)
    x = torch.randn(2, 9, D, dtype=F64)
    q, k, v = (proj(x).unflatten(-1, (4, -1)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = 1 / (torch.einsum("nlhi,nlhi->nlh", q, k.cumsum(1)) + 1e-6)
    memory = torch.einsum("nlhi,nlhj->nlhij", k, v).cumsum(1)
    want = mixer.out_proj((torch.einsum("nlhi,nlhij->nlhj", q, memory) * z[..., None]).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-12)


def test_taylor_features_give_the_second_order():
    q, k = torch.randn(2, 5, 7, dtype=F64)
    phi = FEATURE_MAPS["taylor"]
    s = q @ k.T
    torch.testing.assert_close(phi(q) @ phi(k).T, 1 + s + s * s / 2, rtol=0, atol=1e-12)
    assert phi(q).shape == (5, 1 + 7 + 28)
    assert bool((1 + s + s * s / 2 > 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elu1_of_the_far_negative_is_its_exponential(dtype):
    x = torch.tensor([-8.0, -6.0, -4.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    y = FEATURE_MAPS["elu1"](x.float())
    torch.testing.assert_close(y[:3], x[:3].float().exp(), rtol=1e-2, atol=0)
    assert y[3:].tolist() == [1.0, 4.0]
    slope = torch.autograd.grad(y.sum(), x)[0]
    assert slope[3:].tolist() == [1.0, 1.0]
    low = FEATURE_MAPS["elu1"](x)
    assert float(low[0].detach()) > 3.3e-4
    mixer = build(dtype, n_heads=1, head_dim=1, v_dim=1)
    with torch.no_grad():
        for p in (mixer.q_proj, mixer.k_proj):
            p.weight.zero_()[0, 0] = 1.0
        u = torch.zeros(1, 2, D, dtype=dtype)
        u[0, :, 0] = -8.0
        state = mixer(u, state=mixer.init_state(1))[1]
    torch.testing.assert_close(state["S"][0, 0, 0, 1], torch.tensor(2 * 3.3546e-4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("feature_map", ["relu", "elu1", "taylor"])
@torch.no_grad()
def test_sums_outgrow_half_precision_and_are_not_kept_in_it(dtype, feature_map):
    mixer = build(dtype, n_heads=1, head_dim=8, v_dim=8, feature_map=feature_map, chunk_size=64)
    for proj in (mixer.q_proj, mixer.k_proj):
        proj.weight.mul_(48.0)
    x = torch.randn(1, 4096, D, dtype=dtype)
    wide = build(F64, n_heads=1, head_dim=8, v_dim=8, feature_map=feature_map)
    wide.load_state_dict(mixer.state_dict())
    want, exact = wide(x.double(), state=wide.init_state(1))
    assert float(exact["S"].abs().max()) > 65504
    y, state = mixer(x, state=mixer.init_state(1))
    assert state["S"].dtype == torch.float32
    assert float((y.double() - want).norm() / want.norm()) < 2e-2
    assert float((state["S"].double() - exact["S"]).norm() / exact["S"].norm()) < 2e-2
    tail, state = mixer(x[:, :4000], state=mixer.init_state(1))
    for i in range(4000, 4016):
        step, state = mixer(x[:, i : i + 1], state=state)
        assert float((step.double() - want[:, i : i + 1]).norm() / want[:, i].norm()) < 5e-2
    assert tail.isfinite().all()


def test_tokens_that_weigh_nothing_give_zero_and_finite_gradients():
    """relu features that are all 0, of queries or of keys."""
    mixer = build(feature_map="relu", n_heads=2)
    with torch.no_grad():
        mixer.q_proj.weight.copy_(mixer.q_proj.weight.abs())
        mixer.k_proj.weight.copy_(mixer.k_proj.weight.abs())
    x = torch.cat([-torch.rand(1, 3, D, dtype=F64), torch.rand(1, 2, D, dtype=F64), -torch.rand(1, 1, D, dtype=F64)], 1)
    x.requires_grad_()
    y = mixer(x)[0]
    assert not y[0, :3].any()
    assert not y[0, 5].any()
    assert y[0, 3:5].all()
    for grad in torch.autograd.grad(y.sum(), [x, *mixer.parameters()]):
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    "options", [{}, {"feature_map": "taylor", "n_kv_heads": 1}, {"feature_map": "relu", "decay": "retnet"}]
)
@torch.no_grad()
def test_long_rows_stay_exact_in_float32(options):
    mixer = build(torch.float32, n_heads=2, chunk_size=64, **options)
    wide = build(F64, n_heads=2, chunk_size=64, **options)
    wide.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 65536, D)
    y, state = mixer(x, state=mixer.init_state(1))
    want, exact = wide(x.double(), state=wide.init_state(1))
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-5)
    assert float((state["S"].double() - exact["S"]).norm() / exact["S"].norm()) < 1e-5


def test_the_state_is_one_matrix_a_kv_head_whatever_the_length():
    mixer = build(n_kv_heads=2)
    for t in (1, 5, 40):
        state = mixer(torch.randn(3, t, D, dtype=F64), state=mixer.init_state(3))[1]
        assert state["S"].shape == (3, 2, 4, 4)
        assert state.nbytes() == 3 * 2 * 4 * 4 * 8
    assert build(normaliser=False, feature_map="taylor").init_state(1)["S"].shape == (1, 4, 15, 3)


def test_decay_of_a_rounded_model_is_exact():
    mixer = build(torch.bfloat16, decay="retnet")
    want = torch.log1p(-(2.0 ** (-5 - torch.arange(4, dtype=F64)))).float()
    assert torch.equal(mixer._log_decay(torch.zeros(1)), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "identity"}, "normaliser = true needs weights that are not negative, and feature_map 'identity'"),
        ({"n_kv_heads": 3}, "n_heads = 4 is not divisible by n_kv_heads = 3"),
        ({"decay": (0.5, 0.5)}, "decay has 2 numbers for 4 kv heads"),
        ({"decay": (0.5, 0.5, 0.0, 1.0)}, "must be numbers above 0 and at most 1"),
        ({"decay": (0.5, 0.5, 1.5, 1.0)}, "must be numbers above 0 and at most 1"),
        ({"normaliser": False, "eps": 0.1}, "eps = 0.1 is added to the normaliser, and normaliser is false"),
        ({"feature_map": "elu"}, "feature_map"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        build(**options)


def test_widths_and_positions_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="d_model = 12 is not divisible by n_heads = 5; give head_dim"):
        build(n_heads=5, head_dim=None)
    with pytest.raises(ConfigError, match="'learned' is of site 'input'"):
        build(position={"type": "learned"})
    with pytest.raises(ConfigError, match="'xpos' weighs scores, and linear attention takes none"):
        build(position={"type": "xpos"})


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS[8], OPTIONS[13], OPTIONS[-1]])
def test_the_contract_with_many_options_at_once(options):
    config = LinearAttentionConfig(**{"n_heads": 4, "head_dim": 4, "v_dim": 3, "chunk_size": 4, **options})
    laws = ["cut", "segment", "causal", "gradients", "kernels", "crop", "lora", "bf16", "compile"]
    results = run_checks("mixers", config, laws)
    assert [f"{r.law}: {r.message}" for r in results if not r.ok] == []


@pytest.mark.slow
def test_inductor_agrees_with_eager():
    check_compile(Subject("mixers", LinearAttentionConfig.tiny()), backend="inductor")
