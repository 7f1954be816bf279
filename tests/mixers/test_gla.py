"""Gated Linear Attention, HGRN2 and gated slot attention against fla's plain loops, with the layer around them by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import GLAConfig, GSAConfig, HGRN2Config
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import check_model
from tests.peers import peer

D = 12


def build(config, d_model: int = D, **ctx):
    mixer = config.build(BuildContext(d_model=d_model, param_dtype=torch.float64, **ctx)).eval()
    with torch.no_grad():
        for param in mixer.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    return mixer


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def convolved(x: Tensor, conv, activation) -> Tensor:
    """By torch's own convolution (b c t)."""
    w = conv.weight
    y = F.conv1d(F.pad(x.mT, (w.shape[1] - 1, 0)), w[:, None], groups=w.shape[0])
    return activation(y.mT)


def repeated(x: Tensor, heads: int, states: int) -> Tensor:
    return x.unflatten(-1, (states, -1)).repeat_interleave(heads // states, 2)


def gla_by_hand(m, x: Tensor, edges=None) -> Tensor:
    c = m.config
    q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
    if m.conv is not None:
        q, k, v = (convolved(y, conv, F.silu) for y, conv in ((q, m.conv.q), (k, m.conv.k), (v, m.conv.v)))
    gate = x @ m.decay_proj.down_proj.weight.T @ m.decay_proj.up_proj.weight.T + m.decay_proj.up_proj.bias
    gate = (gate.sigmoid() ** (1 / c.gate_normaliser)).log()
    k, v, gate = (repeated(y, c.n_heads, c.kv_heads) for y in (k, v, gate))
    with StrictFloat64():
        y, _ = peer("fla/ops/gla/naive.py").naive_recurrent_gla(q.unflatten(-1, (c.n_heads, -1)), k, v, gate)
    y = rms(y, m.norm.weight, c.eps).flatten(-2)
    return m.out_proj(y if m.gate_proj is None else y * F.silu(m.gate_proj(x)))


def gsa_by_hand(m, x: Tensor, edges=None) -> Tensor:
    c = m.config
    q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
    if m.conv is not None:
        q, k, v = (convolved(y, conv, F.silu) for y, conv in ((q, m.conv.q), (k, m.conv.k), (v, m.conv.v)))
    gate = m.f_proj(x).sigmoid() ** (1 / c.gate_normaliser)
    q = F.silu(q).unflatten(-1, (c.n_heads, -1))
    k, v, s, g = (y.unflatten(-1, (c.kv_heads, -1)) for y in (F.silu(k), F.silu(v), 1 - gate, gate.log()))
    with StrictFloat64():
        y, _ = peer("fla/ops/gsa/naive.py").naive_recurrent_gsa(q, k, v, s, g, scale=1.0)
    return m.out_proj(rms(F.silu(y.flatten(-2)), m.norm.weight, c.eps))


def hgrn2_by_hand(m, x: Tensor, edges=None) -> Tensor:
    c = m.config
    q, f, i = m.q_proj(x), m.f_proj(x), m.i_proj(x)
    if m.conv is not None:
        q, f, i = (convolved(y, conv, lambda z: z) for y, conv in ((q, m.conv.q), (f, m.conv.f), (i, m.conv.i)))
    bound = 0.0 if not edges else next(iter(edges.values()))
    keep = bound + (1 - bound) * f.sigmoid()
    q, k, v, g = (y.unflatten(-1, (m.n_heads, -1)) for y in (F.silu(q), 1 - keep, i, keep.log()))
    with StrictFloat64():
        y, _ = peer("fla/ops/gla/naive.py").naive_recurrent_gla(q, k, v, g)
    return m.out_proj(rms(y.flatten(-2), m.norm.weight, c.eps))


CASES = [
    (GLAConfig(n_heads=2), gla_by_hand),
    (GLAConfig(n_heads=6, n_kv_heads=3, decay_rank=5, gate_normaliser=2.0, expand_v=1.5), gla_by_hand),
    (GLAConfig(n_heads=3, expand_k=1.0, output_gate=False, chunk_size=5), gla_by_hand),
    (GLAConfig(n_heads=2, d_conv=3), gla_by_hand),
    (HGRN2Config(head_dim=4), hgrn2_by_hand),
    (HGRN2Config(head_dim=3, d_conv=4, chunk_size=3), hgrn2_by_hand),
    (GSAConfig(n_heads=2, n_slots=5), gsa_by_hand),
    (GSAConfig(n_heads=4, n_kv_heads=2, n_slots=7, expand_v=2.0, gate_normaliser=3.0, chunk_size=4), gsa_by_hand),
    (GSAConfig(n_heads=2, n_slots=3, expand_k=0.5, d_conv=2), gsa_by_hand),
]


@pytest.mark.parametrize(("config", "by_hand"), CASES, ids=lambda c: getattr(c, "type", ""))
def test_forward_and_gradients_equal_flas_loop(config, by_hand) -> None:
    mixer = build(config)
    x = torch.randn(2, 11, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 11, D, dtype=torch.float64)
    got, want = mixer(x)[0], by_hand(mixer, x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    params = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_published_sizes_and_starts() -> None:
    gla = GLAConfig().build(BuildContext(d_model=64))
    assert gla.q_proj.weight.shape == (32, 64)
    assert gla.gla.probe.dtype == torch.float32
    assert gla.init_state(1)["memory"]["S"].shape == (1, 4, 8, 16)
    assert not gla.decay_proj.up_proj.bias.any()
    gsa = GSAConfig().build(BuildContext(d_model=64))
    assert {name: tuple(x.shape) for name, x in gsa.init_state(1)["memory"].data.items()} == {
        "K": (1, 4, 16, 64), "V": (1, 4, 64, 16),
    }
    hgrn2 = HGRN2Config().build(BuildContext(d_model=256))
    assert hgrn2.init_state(1)["memory"]["S"].shape == (1, 2, 128, 128)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GLAConfig(n_heads=5), "expand_k \\* d_model = 6 does not divide into n_heads = 5"),
        (GSAConfig(n_heads=5), "expand_k \\* d_model = 12 does not divide into n_heads = 5"),
        (HGRN2Config(), "d_model = 12 is not divisible by head_dim = 128"),
    ],
)
def test_widths_that_do_not_divide(config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.build(BuildContext(d_model=D))
    with pytest.raises(Exception, match="n_heads = 4 is not divisible by n_kv_heads = 3"):
        type(config)(n_kv_heads=3) if "n_kv_heads" in type(config).model_fields else GLAConfig(n_kv_heads=3)


# -- lower bounds over depth ----------------------------------------------------------------------------------------

BLOCKS = {
    "h": {"mixer": {"type": "hgrn2", "head_dim": 4, "chunk_size": 4}},
    "a": {"mixer": {"type": "attention", "n_heads": 2}},
}


def model(pattern: str, **more):
    blocks = {name: block for name, block in BLOCKS.items() if name in pattern}
    config = LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks, **more)
    return config.build(BuildContext(d_model=8, param_dtype=torch.float64)).eval()


def test_each_layer_of_a_stack_has_its_bound() -> None:
    built = model("a h a h*2 a")
    mixers = {i: block.mixer for i, block in enumerate(built.stack.blocks()) if block.mixer.config.type == "hgrn2"}
    assert [name for name, _ in built.named_parameters() if "bounds" in name] == ["stack.layers.1.mixer.bounds.table"]
    table = mixers[1].bounds.table
    torch.nn.init.normal_(table)
    assert table.shape == (5, 8)  # layers 1 to 5
    shares = table.softmax(0)
    bounds = shares.cumsum(0) - shares[0]  # as the published models compute them
    seen: dict[int, tuple[Tensor, Tensor, dict]] = {}
    for i, mixer in mixers.items():
        mixer.register_forward_hook(
            lambda m, args, kwargs, out, i=i: seen.update({i: (args[0], out[0], kwargs.get("edges"))}), with_kwargs=True
        )
    ids = torch.randint(0, 13, (2, 9))
    logits = built(ids).logits
    for i, mixer in mixers.items():
        x, y, edges = seen[i]
        given = {"bound": bounds[i - 1]} if i > 1 else None
        assert (edges is None) == (i == 1)
        torch.testing.assert_close(y, hgrn2_by_hand(mixer, x, given), rtol=1e-9, atol=1e-10)
    (grad,) = torch.autograd.grad(logits.square().sum(), table)
    assert grad.abs().amax(1).gt(0).all()


def test_a_stack_without_later_layers_or_bounds_has_no_table() -> None:
    for pattern in ("h", "a*2 h", "a h a", "h a*2"):
        assert not [name for name, _ in model(pattern).named_parameters() if "bounds" in name]
    free = HGRN2Config(head_dim=4, lower_bound=False).build(BuildContext(d_model=8, n_layers=3))
    assert free.reads == free.writes == ()
    assert not [name for name, _ in free.named_parameters() if "bounds" in name]


@pytest.mark.slow
def test_a_whole_model_with_bounds_keeps_every_law() -> None:
    check_model(LanguageModelConfig(vocab_size=11, d_model=16, pattern="h*3", blocks={"h": BLOCKS["h"]}))


def test_packed_documents_and_decode_see_the_same_bounds() -> None:
    built = model("h*3")
    torch.nn.init.normal_(built.stack.layers["0"].mixer.bounds.table)
    ids = torch.randint(1, 13, (1, 9))
    with torch.no_grad():
        whole = built(ids, segments=Segments.from_lengths([[4, 5]])).logits
        state, steps = built.init_state(1), []
        for i in range(4, 9):
            out = built(ids[:, i : i + 1], state=state)
            steps, state = [*steps, out.logits], out.state
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 4:], rtol=1e-10, atol=1e-10)
