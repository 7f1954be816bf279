"""Positions one by one: against definitions written out here, and against transformers' slopes."""

from __future__ import annotations

import math

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, LengthError, Segments
from hybridtf.mixers import AttentionConfig
from hybridtf.models import LanguageModelConfig
from hybridtf.nn import (
    AlibiConfig,
    LearnedPositionConfig,
    NoPositionConfig,
    RopeConfig,
    SinusoidalPositionConfig,
    XPosConfig,
)
from hybridtf.nn.positions import Rope

F64 = torch.float64


def rope(head_dim=8, **options):
    return RopeConfig(**options).build(BuildContext(d_model=head_dim))


def turned(position, x, positions):
    return position(x, position.table(positions, x.dtype))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_is_a_rotation_in_the_complex_plane(interleaved, fraction):
    x = torch.randn(2, 5, 3, 8, dtype=F64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 100, 3, 0]])
    width = int(8 * fraction)
    pairs, passed = x[..., :width], x[..., width:]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous())
    angle = positions[..., None, None] * 10000.0 ** (-torch.arange(width // 2, dtype=F64) * 2 / width)
    z = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle))
    want = z.flatten(-2) if interleaved else z.transpose(-1, -2).flatten(-2)
    got = turned(rope(fraction=fraction, interleaved=interleaved), x, positions)
    torch.testing.assert_close(got, torch.cat([want, passed], -1))


@pytest.mark.parametrize("make", [rope, lambda: XPosConfig().build(BuildContext(d_model=8))])
def test_scores_depend_on_distance_alone(make):
    q, k = torch.randn(1, 1, 1, 8, dtype=F64), torch.randn(1, 1, 1, 8, dtype=F64)
    position = make()

    def score(n, m):
        at = torch.tensor([[n]]), torch.tensor([[m]])
        a, b = position.read(turned(position, q, at[0]), turned(position, k, at[1]), q_pos=at[0], k_pos=at[1])
        return (a * b).sum()

    torch.testing.assert_close(score(5, 2), score(1_000_005, 1_000_002), rtol=0, atol=1e-8)


def test_far_positions_survive_a_cast_of_the_model():
    x = torch.ones(1, 2048, 1, 32)
    positions = torch.arange(2048)[None]
    exact = turned(rope(32), x.double(), positions)
    half = turned(rope(32).to(torch.bfloat16), x.bfloat16(), positions)
    assert float((half.double() - exact).abs().max()) < 0.02
    far = torch.tensor([[1_000_000, 1_000_001]])
    single = turned(rope(32), x[:, :2], far).double()
    assert float((single - turned(rope(32), x[:, :2].double(), far)).abs().max()) < 1e-6


def test_angles_of_a_half_precision_model_are_those_of_a_double_one():
    positions = torch.arange(2048)[None]
    scaling = {"type": "yarn", "factor": 4.0, "original_max_len": 512}
    exact = rope(32, scaling=scaling).table(positions, F64)
    used = rope(32, scaling=scaling).to(torch.bfloat16).table(positions, torch.bfloat16)
    for got, want in zip(used, exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-7)
        assert len(got[0, :, 0, 0].unique()) > 2000  # no two positions fall together


def test_nothing_is_stored_in_a_model():
    model = rope(32, scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_len": 9})
    assert not list(model.buffers())
    assert not list(model.parameters())


def _stack(*thetas, windows=(None, None)):
    blocks = {
        name: {"mixer": {
            "type": "attention", "n_heads": 2, "window": window,
            "position": {"type": "rope", "theta": theta, "fraction": 0.5 if name == "a" else 1.0},
        }}
        for name, theta, window in zip("ab", thetas, windows, strict=True)
    }
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern="a b a b", blocks=blocks)
    return config.build(BuildContext(d_model=16, param_dtype=torch.float64)).eval()


@pytest.fixture
def tables(monkeypatch):
    """The dtype of every table that is made."""
    made = []
    table = Rope.table

    def counted(self, positions, dtype, **options):
        made.append(dtype)
        return table(self, positions, dtype, **options)

    monkeypatch.setattr(Rope, "table", counted)
    return made


def test_layers_of_a_call_make_a_table_once(tables):
    """One for each kind of position, with a state or without, and none is kept for the next call."""
    model, ids = _stack(10.0, 100.0, windows=(None, 3)), torch.randint(17, (2, 7))
    with torch.no_grad():
        whole = model(ids).logits
        assert len(tables) == 2
        state = model.init_state(2)
        for i in range(7):
            out = model(ids[:, i : i + 1], state=state)
            state = out.state
            torch.testing.assert_close(out.logits[:, 0], whole[:, i], rtol=0, atol=1e-12)
            assert len(tables) == 2 + 2 * (i + 1)
    model(ids)
    assert len(tables) == 16 + 4  # with gradients each layer makes its own: a graph would hold what is shared


def test_rows_and_documents_of_other_lengths_share_no_table(tables):
    model = _stack(10.0, 10.0)
    ids = torch.randint(1, 17, (2, 6))
    documents = Segments.from_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]]))
    with torch.no_grad():
        got = model(ids, segments=documents, state=model.init_state(2))
        torch.testing.assert_close(got.logits[:1, 2:5], model(ids[:1, 2:5]).logits, rtol=0, atol=1e-12)
        after = model(ids[:, :2], state=got.state).logits  # rows of 3 and of 6 tokens go on
        for row, before in enumerate((ids[:1, 2:5], ids[1:])):
            alone = model(torch.cat([before, ids[row : row + 1, :2]], 1)).logits[:, -2:]
            torch.testing.assert_close(after[row : row + 1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [4, 8])
def test_neighbours_and_halves_are_turned_in_one_stack(head_dim):
    blocks = {
        name: {"mixer": {
            "type": "attention", "n_heads": 2, "head_dim": head_dim, "position": {"type": "rope", "interleaved": name == "b"},
        }}
        for name in "ab"
    }
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern="a b a b", blocks=blocks)
    model, ids = config.build(BuildContext(d_model=16, param_dtype=torch.float64)).eval(), torch.randint(17, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, model_with_gradients(model, ids), rtol=0, atol=1e-12)


def model_with_gradients(model, ids):
    with torch.enable_grad():
        return model(ids).logits.detach()


def test_a_subclass_of_rope_makes_its_own_tables():
    class Turned(Rope):
        def frequencies(self, device, length=None):
            return 2 * super().frequencies(device, length)

    plain, turned = Rope(4, 10.0, False), Turned(4, 10.0, False)
    assert plain.table_key() == Rope(4, 10.0, False).table_key() != Rope(4, 11.0, False).table_key()
    assert turned.table_key() is None


@pytest.mark.parametrize(("head_dim", "fraction"), [(5, 1.0), (6, 0.5), (2, 0.5)])
def test_odd_rotated_widths_are_refused(head_dim, fraction):
    with pytest.raises(ConfigError, match="rope rotates pairs"):
        rope(head_dim, fraction=fraction)


def test_unused_rows_of_a_learned_table_are_not_read():
    table = LearnedPositionConfig(unused_rows=2).build(BuildContext(d_model=4, max_seq_len=3))
    with torch.no_grad():
        table.table.copy_(torch.arange(5.0)[:, None].expand(5, 4))
    positions = torch.tensor([[0, 2]])
    torch.testing.assert_close(table(torch.zeros(1, 2, 4), positions), torch.tensor([2.0, 4.0])[None, :, None].expand(1, 2, 4))
    with pytest.raises(LengthError, match="4 tokens"):
        table(torch.zeros(1, 1, 4), torch.tensor([[3]]))


def test_alibi_scaled():
    one, half = (AlibiConfig(scale=s).build(BuildContext(d_model=8))(6, torch.device("cpu")) for s in (1.0, 0.5))
    torch.testing.assert_close(half, one / 2)


def test_learned_table_adds_and_refuses():
    table = LearnedPositionConfig().build(BuildContext(d_model=4, max_seq_len=3))
    x = torch.zeros(1, 3, 4)
    torch.testing.assert_close(table(x, torch.tensor([[2, 0, 1]]))[0], table.table[[2, 0, 1]])
    with pytest.raises(LengthError, match="4 tokens"):
        table(x, torch.tensor([[3, 0, 1]]))
    assert NoPositionConfig().build(BuildContext(d_model=4)) is None


# -- sinusoidal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_sinusoids_are_those_of_the_paper(layout, scale):
    told = SinusoidalPositionConfig(layout=layout, scale=scale, theta=1000.0).build(BuildContext(d_model=6))
    positions = torch.tensor([[0, 3, 70_000], [1, 1, 2]])
    x = torch.randn(2, 3, 6, dtype=F64)
    got = told(x, positions) - x
    for (b, t), n in ((at, int(positions[at])) for at in ((i, j) for i in range(2) for j in range(3))):
        for i in range(3):
            places = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 3)
            angle = n / 1000.0 ** (2 * i / 6)
            want = [scale * math.sin(angle), scale * math.cos(angle)]
            torch.testing.assert_close(got[b, t, list(places)], torch.tensor(want, dtype=F64), rtol=0, atol=1e-9)


def test_sinusoids_need_pairs():
    with pytest.raises(ConfigError, match="even width: d_model = 5"):
        SinusoidalPositionConfig().build(BuildContext(d_model=5))


# -- ALiBi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 25, 71, 112])
def test_slopes_are_those_of_bloom_falcon_and_mpt(n_heads):
    bloom, falcon, mpt = (pytest.importorskip(f"transformers.models.{n}.modeling_{n}") for n in ("bloom", "falcon", "mpt"))
    slopes = AlibiConfig().build(BuildContext(d_model=8))(n_heads, torch.device("cpu")).float()
    ours, mask = slopes[:, None] * torch.arange(4), torch.ones(1, 4, dtype=torch.int64)
    torch.testing.assert_close(ours, bloom.build_alibi_tensor(mask, n_heads, torch.float32)[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours - ours[:, -1:], mpt.build_mpt_alibi_tensor(n_heads, 4)[:, 0], rtol=1e-6, atol=1e-6)
    theirs = falcon.build_alibi_tensor(mask, n_heads, torch.float32)[:, 0]  # rounded to bfloat16 on the way
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("n_heads", [1, 3, 12, 16])
def test_slopes_are_exact_in_float64(n_heads):
    power = 2 ** int(math.log2(n_heads))
    wanted = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    wanted += [2 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(n_heads - power)]
    slopes = AlibiConfig().build(BuildContext(d_model=8))(n_heads, torch.device("cpu"))
    assert slopes.tolist() == pytest.approx(wanted, rel=1e-15)


def test_the_steepness_is_an_option():
    slopes = AlibiConfig(max_bias=4.0).build(BuildContext(d_model=8))(12, torch.device("cpu")).float()
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    theirs = -mpt.build_mpt_alibi_tensor(12, 2, alibi_bias_max=4)[:, 0, 0]
    torch.testing.assert_close(slopes, theirs)


# -- xPos --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
def test_xpos_is_its_definition(interleaved):
    """zeta^(n/s) on queries and zeta^(-m/s) on keys, where the numbers are small enough to write that down."""
    d, t, s = 8, 40, 16.0
    told = XPosConfig(scale_base=s, interleaved=interleaved).build(BuildContext(d_model=d))
    q, k = torch.randn(1, t, 3, d, dtype=F64), torch.randn(1, t, 1, d, dtype=F64)
    at = torch.arange(t)
    zeta = (torch.arange(0, d, 2, dtype=F64) + 0.4 * d) / (1.4 * d)
    zeta = zeta.repeat_interleave(2) if interleaved else zeta.repeat(2)
    weight = zeta ** (at[:, None].double() / s)
    plain = rope(d, interleaved=interleaved)
    want_q = turned(plain, q, at[None]) * weight[:, None]
    want_k = turned(plain, k, at[None]) / weight[:, None]
    want = torch.einsum("bthk,bsgk->bhts", want_q, want_k).tril()
    for first in (0, 11, t - 1):
        a, b = told.read(turned(told, q, at[None])[:, first:], turned(told, k, at[None]))
        got = torch.einsum("bthk,bsgk->bhts", a, b).tril(first)
        torch.testing.assert_close(got, want[:, :, first:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_xpos_stays_finite_and_right_at_a_million(dtype):
    told = XPosConfig().build(BuildContext(d_model=16))
    t, far = 7, 1_000_000
    at = torch.arange(far, far + t)[None]
    held = torch.cat([torch.tensor([[0, 5, far - 60_000, far - 900]]), at], 1)
    q, k = torch.randn(1, t, 1, 16, dtype=dtype), torch.randn(1, held.shape[1], 1, 16, dtype=dtype)
    a, b = told.read(q, k, q_pos=at, k_pos=held)
    assert bool(torch.isfinite(a).all())
    assert bool(torch.isfinite(b).all())
    zeta = ((torch.arange(8, dtype=F64) / 8 + 0.4) / 1.4).repeat(2)
    distance = (at[0, :, None] - held[0, None]).double()
    true = torch.einsum("tk,sk,tsk->ts", q[0, :, 0].double(), k[0, :, 0].double(), zeta ** (distance[..., None] / 512))
    got = torch.einsum("tk,sk->ts", a[0, :, 0].double(), b[0, :, 0].double())
    hidden = distance < 0
    error = (got - true).masked_fill(hidden, 0).abs().max()
    assert float(error) < 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_a_whole_span_of_xpos_is_finite(dtype):
    told = XPosConfig().build(BuildContext(d_model=4))
    span = told.span(dtype)
    assert span > 2000
    a, b = told.read(torch.ones(1, span, 1, 4, dtype=dtype), torch.ones(1, span, 1, 4, dtype=dtype))
    assert bool(torch.isfinite(a).all() & torch.isfinite(b).all() & (a > 0).all())
    torch.testing.assert_close(a * b, torch.ones_like(a), rtol=20 * torch.finfo(dtype).eps, atol=0)


def test_xpos_refuses_what_looks_ahead():
    with pytest.raises(ConfigError, match="looks both ways: use rope"):
        XPosConfig().build(BuildContext(d_model=8, causal=False))
    with pytest.raises(ConfigError, match="head_dim 5 must be even"):
        XPosConfig().build(BuildContext(d_model=5))
    block = {"mixer": {"type": "attention", "n_heads": 2, "position": {"type": "xpos"}}}
    model = LanguageModelConfig(vocab_size=5, d_model=8, pattern="a", blocks={"a": block}).build()
    assert model.stack.takes == set()


# -- sites -------------------------------------------------------------------------------------------------------------


def test_a_position_of_another_site_is_refused_by_name():
    ctx = BuildContext(d_model=8, where="mixer")
    for name in ("learned", "sinusoidal"):
        with pytest.raises(ConfigError, match=f"mixer.position: '{name}' is of site 'input', and here site 'qk' or 'bias'"):
            AttentionConfig(n_heads=2, position={"type": name}).build(ctx)
    for name, site in (("rope", "qk"), ("xpos", "qk"), ("alibi", "bias")):
        stem = {"type": "token_embedding", "position": {"type": name}}
        model = LanguageModelConfig(
            vocab_size=5, d_model=8, pattern="a", stem=stem, blocks={"a": {"mixer": {"type": "attention", "n_heads": 2}}}
        )
        with pytest.raises(ConfigError, match=f"stem.position: '{name}' is of site '{site}', and here site 'input' is wanted"):
            model.build()
