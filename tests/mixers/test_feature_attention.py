"""Mixers by features of queries and keys, against other people's references and the formulas of their papers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, LengthError, Segments
from hybridtf.mixers import BasedConfig, CosformerConfig, LinearTransformerConfig, PerformerConfig, RebasedConfig
from hybridtf.nn.random_features import NOTHING, orthogonal_rows, running_bound
from tests.peers import peer

D, H, T = 12, 3, 11
F64 = torch.float64


def build(config_cls, dtype=F64, d_model=D, max_seq_len=64, seed=0, **options):
    config = config_cls(**{"n_heads": H, "chunk_size": 4, **options})
    ctx = BuildContext(d_model=d_model, max_seq_len=max_seq_len, param_dtype=dtype, seed=seed)
    mixer = config.build(ctx).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn_like(param) if "norm" in name or "bias" in name else 0)
    return mixer


def heads(mixer, x):
    """q, k, v (b t h k) of x (b t d)."""
    return tuple(proj(x).unflatten(-1, (mixer.n_heads, -1)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))


def agree(mixer, x, want, rtol=1e-9, atol=1e-9):
    """Output and gradients of all that learns, of one call and of ``want(x)``."""
    x = x.detach().requires_grad_()
    weight = torch.randn(x.shape, dtype=x.dtype)
    got, expected = mixer(x)[0], want(x)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    asked = [x, *(p for p in mixer.parameters() if p.requires_grad)]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), asked) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol * 100, atol=atol * 100)


def all_pairs(mixer, weights):
    """``weights(q, k)`` (b h t t) for q, k (b h t k), written out, causal and divided by their sum."""

    def run(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        w = weights(q, k).tril()
        return mixer.out_proj((w / w.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))

    return run


def test_linear_transformer_equals_the_recurrence_of_others():
    """fla's loop runs in float32 inside, and adds 1e-10 to the normaliser where the paper's code adds 1e-6."""
    naive = peer("fla/ops/linear_attn/naive.py").naive_recurrent_linear_attn
    mixer = build(LinearTransformerConfig, torch.float32, eps=0.0)

    def want(x):
        q, k, v = heads(mixer, x)
        y, _ = naive(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)
        return mixer.out_proj(y.flatten(2))

    agree(mixer, torch.randn(2, T, D), want, rtol=1e-5, atol=1e-6)


def test_linear_transformer_equals_the_paper():
    """Equation 9 with the code's 1e-6 in the denominator."""
    mixer = build(LinearTransformerConfig)

    def want(x):
        q, k, v = heads(mixer, x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("bthi,bthj->bthij", k, v).cumsum(1)
        y = torch.einsum("bthi,bthij->bthj", q, memory) / (torch.einsum("bthi,bthi->bth", q, k.cumsum(1)) + 1e-6)[..., None]
        return mixer.out_proj(y.flatten(2))

    agree(mixer, torch.randn(2, T, D, dtype=F64), want)


@pytest.mark.parametrize("feature_dim", [1, 5])
def test_based_equals_the_reference_of_others(feature_dim):
    naive = peer("fla/ops/based/naive.py").naive_parallel_based
    mixer = build(BasedConfig, feature_dim=feature_dim, eps=1e-6)

    def want(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        return mixer.out_proj(naive(q, k, v).transpose(1, 2).flatten(2))

    agree(mixer, torch.randn(2, T, D, dtype=F64), want)


@pytest.mark.parametrize("options", [{}, {"use_gamma": False}, {"use_beta": False}])
def test_rebased_equals_the_reference_of_others(options):
    """Their layer normalises q and k with one gamma and beta; their kernel squares the products."""
    naive = peer("fla/ops/rebased/naive.py").naive_parallel_rebased
    mixer = build(RebasedConfig, feature_dim=5, eps=1e-6, **options)

    def want(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        norm = mixer.feature_norm
        q, k = (F.layer_norm(z, (5,), norm.weight, norm.bias, 1e-5) for z in (q, k))
        return mixer.out_proj(naive(q, k, v).transpose(1, 2).flatten(2))

    agree(mixer, torch.randn(2, T, D, dtype=F64), want)


def test_published_defaults():
    assert (BasedConfig().n_heads, BasedConfig().feature_dim, BasedConfig().eps) == (12, 16, 1e-12)
    assert (RebasedConfig().n_heads, RebasedConfig().feature_dim, RebasedConfig().eps) == (16, 16, 1e-5)
    assert BasedConfig().build(BuildContext(d_model=24)).n_features == 1 + 16 + 136
    assert RebasedConfig().build(BuildContext(d_model=32)).n_features == 136
    assert PerformerConfig().n_features == 256


# -- cosformer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "max_distance"), [(T, None), (T, 11), (1, 1), (20, 37)])
def test_cosformer_equals_the_formula_over_all_pairs(t, max_distance):
    """relu(q_i).relu(k_j) cos(pi/2 (i - j)/M), rows divided by the larger of their sum and 1e-6."""
    mixer = build(CosformerConfig, max_distance=max_distance, max_seq_len=29)
    m = max_distance or 29

    def want(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        i = torch.arange(t, dtype=F64)
        w = (q.relu() @ k.relu().mT * torch.cos(math.pi / 2 * (i[:, None] - i) / m)).tril()
        y = w @ v / w.sum(-1, keepdim=True).clamp(min=1e-6)
        return mixer.out_proj(y.transpose(1, 2).flatten(2))

    agree(mixer, torch.randn(2, t, D, dtype=F64), want)


def test_cosformer_refuses_longer_documents_and_counts_each_from_its_start():
    mixer = build(CosformerConfig, max_distance=6)
    x = torch.randn(1, 12, D, dtype=F64)
    with pytest.raises(LengthError, match=r"a document of 7 tokens is longer than cosformer's max_distance = 6"):
        mixer(x[:, :7])
    mixer(x, segments=Segments.from_ids(torch.tensor([[0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]])))
    state = mixer(x[:, :6], state=mixer.init_state(1))[1]
    with pytest.raises(LengthError, match="a document of 7 tokens"):
        mixer(x[:, 6:7], state=state)
    mixer(x[:, 6:7], state=state, segments=Segments.from_ids(torch.zeros(1, 1, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="max_distance"):
        CosformerConfig(max_distance=0)


def outside(mixer, kernel_of):
    """The layer with performer-pytorch's causal attention over ``kernel_of(q)``, ``kernel_of(k)``, (b h t n), without the small
    number that it adds to what it divides by."""
    module = performer_pytorch()

    def run(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        q, k = kernel_of(q, True), kernel_of(k, False)
        return mixer.out_proj(module.causal_linear_attention_noncuda(q, k, v, chunk_size=3, eps=0.0).transpose(1, 2).flatten(2))

    return run


def performer_pytorch():
    return peer("performer_pytorch.performer_pytorch", local_attention={}, axial_positional_embedding={})


@pytest.mark.parametrize("t", [2, 23])
def test_cosformer_is_the_causal_linear_attention_of_performer_pytorch_over_its_features(t):
    mixer = build(CosformerConfig, max_distance=23)
    angle = (torch.arange(t, dtype=F64) * math.pi / 2 / 23)[:, None]

    def kernel(z, is_query):
        return torch.cat([z.relu() * angle.cos(), z.relu() * angle.sin()], -1)

    with torch.no_grad():  # some feature of every query meets one of a key: theirs divides by zero otherwise
        mixer.q_proj.bias.add_(1)
        mixer.k_proj.bias.add_(1)
    agree(mixer, torch.randn(2, t, D, dtype=F64), outside(mixer, kernel))


# -- performer ---------------------------------------------------------------------------------------------------------


def softmax_attention(mixer):
    def run(x):
        q, k, v = (z.transpose(1, 2) for z in heads(mixer, x))
        return mixer.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return run


def test_performer_equals_its_features_over_all_pairs():
    """Both factors written out without any stabiliser; it cancels, gradients included."""
    mixer = build(PerformerConfig, n_features=7)
    w = mixer.random.directions.detach()

    def phi(z):
        z = z * (D // H) ** -0.25
        return (z @ w.T - z.square().sum(-1, keepdim=True) / 2).exp() / 7**0.5

    agree(mixer, torch.randn(2, T, D, dtype=F64), all_pairs(mixer, lambda q, k: phi(q) @ phi(k).mT))


@pytest.mark.parametrize("regularised", [False, True])
@pytest.mark.parametrize("t", [2, 23])
def test_performer_is_the_attention_of_performer_pytorch(t, regularised):
    """Its softmax kernel and its causal attention; what it adds to each feature and divisor against zeros is set to zero."""
    mixer = build(PerformerConfig, n_features=13, regularised=regularised)

    def kernel(z, is_query):
        directions = mixer.random.directions
        return performer_pytorch().softmax_kernel(z, projection_matrix=directions, is_query=is_query, eps=0.0)

    agree(mixer, torch.randn(2, t, D, dtype=F64), outside(mixer, kernel))


@pytest.mark.parametrize("regularised", [False, True])
def test_directions_are_distributed_as_those_of_performer_pytorch(regularised):
    """Blocks of orthogonal rows, a last one cut off; lengths of normal vectors, or all the same."""
    torch.manual_seed(0)
    theirs = performer_pytorch().gaussian_orthogonal_random_matrix(4001, 4, scaling=int(regularised))
    ours = torch.empty(4001, 4)
    orthogonal_rows(regularised)(ours, torch.Generator().manual_seed(0))
    for drawn in (ours, theirs):
        block = F.normalize(drawn[8:12], dim=1)
        torch.testing.assert_close(block @ block.T, torch.eye(4), rtol=0, atol=1e-5)
    lengths = [drawn.norm(dim=1).sort().values for drawn in (ours, theirs)]
    torch.testing.assert_close(lengths[0].mean(), lengths[1].mean(), rtol=0.02, atol=0)
    torch.testing.assert_close(lengths[0].std(), lengths[1].std(), rtol=0.05, atol=1e-5)


@torch.no_grad()
def test_performer_error_against_exact_softmax_falls_with_the_features():
    """As 1 / sqrt(n_features), over draws of the directions."""
    torch.manual_seed(0)
    x = 0.2 * torch.randn(1, 24, D, dtype=F64)
    errors = []
    for n in (8, 128, 2048):
        mixer = build(PerformerConfig, n_features=n)
        want, found = softmax_attention(mixer)(x), []
        for seed in range(12):
            mixer.redraw(seed)
            found.append(float((mixer(x)[0] - want).square().mean()))
        errors.append((sum(found) / len(found)) ** 0.5)
    for before, after in itertools.pairwise(errors):
        assert 3.0 < before / after < 5.5, errors


@torch.no_grad()
def test_the_estimate_of_the_kernel_is_unbiased():
    """The mean over draws of phi(q).phi(k) is exp(q.k), for whichever direction q and k point in."""
    d, generator = 6, torch.Generator().manual_seed(3)
    w = torch.empty(4000, d, d)
    for block in w:
        orthogonal_rows(False)(block, generator)
    for axis in range(d):
        q, k = torch.randn(2, d, generator=generator) * 0.2
        q[axis] += 0.5
        k[axis] += 0.5
        found = ((w @ q - q @ q / 2).exp() * (w @ k - k @ k / 2).exp()).mean(1)
        assert abs(float(found.mean() - (q @ k).exp())) < 4 * float(found.std()) / 4000**0.5


@pytest.mark.parametrize("regularised", [False, True])
def test_directions_are_orthogonal_within_a_block(regularised):
    w = torch.empty(11, 4)
    orthogonal_rows(regularised)(w, torch.Generator().manual_seed(0))
    for block in w.split(4):
        products = block @ block.T
        torch.testing.assert_close(products, torch.diag(products.diagonal()), rtol=0, atol=1e-5)
    lengths = w.norm(dim=1)
    assert torch.allclose(lengths, torch.full((11,), 2.0)) == regularised


def test_directions_come_from_the_seed_are_saved_and_change_when_asked_only():
    one, two, other = (build(PerformerConfig, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.random.directions, two.random.directions)
    assert not torch.equal(one.random.directions, other.random.directions)
    assert "random.directions" in one.state_dict()
    before = one.random.directions.clone()
    x = torch.randn(1, 5, D, dtype=F64)
    for _ in range(3):
        one.train()(x)[0].sum().backward()
    assert torch.equal(before, one.random.directions)
    assert one.random.directions.grad is None
    one.redraw(5)
    two.redraw(5)
    assert torch.equal(one.random.directions, two.random.directions)
    assert not torch.equal(one.random.directions, before)


def test_performer_stays_finite_and_right_with_large_queries_and_keys():
    """Exponents in the hundreds, growing along the row, in float32: as in float64, where nothing leaves the range."""
    narrow, wide = (build(PerformerConfig, dtype, n_features=32) for dtype in (torch.float32, F64))
    wide.load_state_dict({name: value.double() for name, value in narrow.state_dict().items()})
    x = torch.randn(2, 40, D) * torch.linspace(1, 12, 40)[:, None]
    x.requires_grad_()
    y = narrow(x)[0]
    assert y.isfinite().all()
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()
    want, y = wide(x.detach().double())[0].detach(), y.detach()
    assert float((y.double() - want).norm() / want.norm()) < 1e-3
    assert float(wide.random.exponents(heads(wide, x.detach().double())[1] * 4**-0.25).detach().min()) < -200


def test_an_earlier_document_of_large_keys_does_not_drown_the_next():
    mixer = build(PerformerConfig, torch.float32, n_features=32)
    x = torch.randn(1, 16, D)
    loud = torch.cat([x[:, :8] * 40, x[:, 8:]], 1)
    ids = torch.tensor([[1] * 8 + [2] * 8])
    got = mixer(loud, segments=Segments.from_ids(ids))[0][:, 8:]
    torch.testing.assert_close(got, mixer(x[:, 8:])[0], rtol=1e-5, atol=1e-6)


def test_running_bound_is_each_documents_own():
    exponents = torch.tensor([[1.2, 0.5, 3.7, -9.0, -7.5, 8.0, -20.0]])[..., None, None]
    segments = Segments.from_ids(torch.tensor([[1, 1, 0, 2, 2, 0, 2]]))
    before = torch.tensor([[5.0]])
    assert running_bound(exponents, segments, before)[0, :, 0].tolist() == [5.0, 5.0, 5.0, -9.0, -7.0, -7.0, -7.0]
    assert running_bound(exponents, None, torch.tensor([[NOTHING]]))[0, :, 0].tolist() == [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    fresh = Segments.from_ids(torch.tensor([[0, 3, 3, 3, 3, 3, 4]]), continues=False)
    assert running_bound(exponents, fresh, before)[0, 1:, 0].tolist() == [1.0, 4.0, 4.0, 4.0, 8.0, -20.0]


@pytest.mark.parametrize("config_cls", [LinearTransformerConfig, PerformerConfig, CosformerConfig])
@torch.no_grad()
def test_stretches_without_gradients_change_nothing(config_cls, monkeypatch):
    mixer = build(config_cls)
    x = torch.randn(3, 23, D, dtype=F64)
    ids = torch.tensor([[1] * 9 + [2] * 14, [0] * 12 + [1] * 11, [0] * 23])
    for segments in (None, Segments.from_ids(ids, continues=torch.tensor([True, False, True]))):
        before = mixer(x[:, :7], state=mixer.init_state(3))[1]
        want = mixer(x, segments=segments)[0], *mixer(x, segments=segments, state=before.clone())
        with monkeypatch.context() as patch:
            patch.setattr("hybridtf.mixers.feature_attention.STRETCH", 5)
            got = mixer(x, segments=segments)[0], *mixer(x, segments=segments, state=before.clone())
        for a, b in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        assert got[2].length.tolist() == want[2].length.tolist()
        for name, value in want[2].data.items():
            torch.testing.assert_close(got[2][name], value, rtol=0, atol=1e-11)


def test_widths_that_do_not_fit_are_refused():
    for config_cls in (LinearTransformerConfig, PerformerConfig, CosformerConfig, BasedConfig, RebasedConfig):
        with pytest.raises(ConfigError, match="d_model = 12 does not divide into n_heads = 5 heads"):
            build(config_cls, n_heads=5)
