"""Attention with each position: the kit's laws, decode beyond the trained length, packing, and explicit formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from hybridtf.core import BuildContext, ConfigError, KernelError, Segments, StateError, crop, reorder, restore, snapshot
from hybridtf.mixers import AttentionConfig
from hybridtf.nn import XPos
from hybridtf.testing import run_checks

F64 = torch.float64
D, HEAD, ORIGINAL, MAX = 12, 8, 16, 64
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 3.0, 5.0, 9.0], "original_max_len": ORIGINAL}


def scaled(**scaling):
    return {"type": "rope", "scaling": scaling}


FIXED = {
    "none": {"type": "none"},
    "rope, partial, neighbours": {"type": "rope", "fraction": 0.5, "interleaved": True},
    "linear": scaled(type="linear", factor=3.0),
    "ntk": scaled(type="ntk", factor=3.0),
    "yarn": scaled(type="yarn", factor=4.0, original_max_len=ORIGINAL),
    "llama3": scaled(type="llama3", factor=4.0, original_max_len=ORIGINAL),
    "xpos": {"type": "xpos", "scale_base": 8.0},
    "alibi": {"type": "alibi"},
}
DECLARED = {
    "dynamic ntk": scaled(type="dynamic_ntk", factor=2.0, original_max_len=ORIGINAL),
    "longrope": scaled(type="longrope", **LONG),
}
RUNNING = {name: scaled(**{**position["scaling"], "mode": "running"}) for name, position in DECLARED.items()}


def build(position, *, causal=True, **options):
    config = AttentionConfig(**{"n_heads": 4, "n_kv_heads": 2, "head_dim": HEAD, "position": position, **options})
    ctx = BuildContext(d_model=D, param_dtype=F64, max_seq_len=MAX, causal=causal)
    return config.build(ctx).eval()


def tokens(*shape):
    return torch.randn(*shape, D, dtype=F64)


@torch.no_grad()
def decoded(mixer, x, first, *, max_len=None):
    """The first tokens in one call, then one at a time, on a state of this ``max_len``."""
    state = mixer.init_state(x.shape[0], max_len)
    outs = []
    for part in (x[:, :first], *x[:, first:].split(1, 1)):
        y, state = mixer(part, state=state)
        outs.append(y)
    return torch.cat(outs, 1), state


@torch.no_grad()
def whole(mixer, x, *, max_len=None):
    return mixer(x, state=mixer.init_state(x.shape[0], max_len))[0]


# -- decode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", [*FIXED, *DECLARED])
def test_decode_beyond_the_trained_length_equals_one_forward(name, window):
    mixer, x = build({**FIXED, **DECLARED}[name], window=window), tokens(2, 24)
    for first, max_len in ((1, None), (10, None), (15, 24), (16, 40), (17, MAX)):
        got, _ = decoded(mixer, x, first, max_len=max_len)
        torch.testing.assert_close(got, whole(mixer, x, max_len=max_len), rtol=0, atol=1e-11)
    torch.testing.assert_close(whole(mixer, x), mixer(x)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", DECLARED)
def test_the_declared_length_decides(name, window):
    mixer, x = build(DECLARED[name], window=window), tokens(1, 12)
    short = scaled(type="longrope", **{**LONG, "long_factor": LONG["short_factor"]})
    plain = build(short if name == "longrope" else {"type": "rope"}, window=window)
    plain.load_state_dict(mixer.state_dict())
    for max_len in (12, ORIGINAL):
        torch.testing.assert_close(whole(mixer, x, max_len=max_len), whole(plain, x, max_len=max_len), rtol=0, atol=0)
    for max_len in (ORIGINAL + 1, 40, None):
        assert float((whole(mixer, x, max_len=max_len) - whole(plain, x)).abs().max()) > 1e-5


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", DECLARED)
@torch.no_grad()
def test_every_move_of_a_state_keeps_the_declared_length(name, window):
    mixer, x = build(DECLARED[name], window=window), tokens(2, 24)
    want = whole(mixer, x, max_len=40)
    y, state = mixer(x[:, :9], state=mixer.init_state(2, 40))
    state = restore(snapshot(reorder(state, torch.tensor([1, 0]))))
    x, want = x.flip(0), want.flip(0)
    y, state = mixer(x[:, 9:20], state=state, keep=4)
    y, state = mixer(x[:, 16:], state=crop(state, 4))
    torch.testing.assert_close(y, want[:, 16:], rtol=0, atol=1e-11)
    assert state.max_len == 40


@pytest.mark.parametrize("name", RUNNING)
@torch.no_grad()
def test_the_running_length_says_that_it_cannot_be_cut(name):
    mixer, x = build(RUNNING[name]), tokens(1, 24)
    assert set(mixer.cannot) == {"cut", "crop"}
    assert "mode 'declared' fixes it" in mixer.cannot["cut"]
    got, _ = decoded(mixer, x, 10)
    want = mixer(x)[0]
    assert float((got - want).abs().max()) > 1e-4
    short = x[:, :ORIGINAL]
    torch.testing.assert_close(decoded(mixer, short, 5)[0], mixer(short)[0], rtol=0, atol=1e-11)
    assert not build(DECLARED[name]).cannot


# -- documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", [*FIXED, *DECLARED, *(f"{name}, running" for name in RUNNING)])
def test_packed_and_padded_documents_are_told_their_own_positions(name, window):
    known = {**FIXED, **DECLARED, **{f"{n}, running": p for n, p in RUNNING.items()}}
    mixer = build(known[name], window=window)
    docs = [tokens(n) for n in (5, 21, 1, 17)]
    rows = [[None, None, docs[0], docs[1]], [docs[3], None, docs[2]], [None, docs[1]]]
    x, ids = torch.full((3, 28, D), 1e3, dtype=F64), torch.zeros(3, 28, dtype=torch.int64)
    placed = []
    for r, row in enumerate(rows):
        at = 0
        for i, doc in enumerate(row):
            if doc is None:
                at += 1
                continue
            x[r, at : at + len(doc)], ids[r, at : at + len(doc)] = doc, i + 1
            placed.append((r, slice(at, at + len(doc)), doc))
            at += len(doc)
    y = mixer(x, segments=Segments.from_ids(ids))[0]
    for r, columns, doc in placed:
        torch.testing.assert_close(y[r, columns], mixer(doc[None])[0][0], rtol=0, atol=1e-11)


# -- xPos --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_xpos_in_spans_equals_one_span(monkeypatch, window):
    mixer, x = build(FIXED["xpos"], window=window), tokens(3, 23)
    ids = torch.zeros(3, 23, dtype=torch.int64)
    ids[0, 2:], ids[1, :9], ids[1, 11:] = 1, 1, 2
    cases = [(x, None), (x, Segments.from_ids(ids))]
    want = [(mixer(x, segments=s)[0], decode_in_parts(mixer, x, s)) for x, s in cases]
    for span in (1, 4, 22, 23):
        monkeypatch.setattr(XPos, "span", lambda self, dtype, span=span: span)
        for (x, s), (y, parts) in zip(cases, want, strict=True):
            real = slice(None) if s is None else s.real
            torch.testing.assert_close(mixer(x, segments=s)[0][real], y[real], rtol=0, atol=1e-11)
            torch.testing.assert_close(decode_in_parts(mixer, x, s)[real], y[real], rtol=0, atol=1e-11)
            torch.testing.assert_close(parts[real], y[real], rtol=0, atol=1e-11)


@torch.no_grad()
def decode_in_parts(mixer, x, segments):
    state, outs = mixer.init_state(x.shape[0]), []
    for a, b in itertools.pairwise((0, 9, 10, 23)):
        y, state = mixer(x[:, a:b], segments=None if segments is None else segments.narrow(a, b), state=state)
        outs.append(y)
    return torch.cat(outs, 1)


@torch.no_grad()
def test_xpos_decodes_at_a_million_as_near_the_start():
    """Only distances count: a window's outputs are the same wherever the window stands."""
    options = {"position": {"type": "xpos"}, "n_heads": 2, "head_dim": 8, "window": 6}
    mixer = AttentionConfig(**options).build(BuildContext(d_model=D)).eval()
    x = torch.randn(1, 20, D)
    outs = []
    for start in (0, 1_000_000):
        state = mixer.init_state(1)
        state = type(state)(state.data, state.length + start, window=6, oldest=state.oldest + start)
        y, _ = mixer(x, state=state)
        outs.append(y)
    assert bool(torch.isfinite(outs[1]).all())
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-5)


def test_xpos_refuses_a_prefix():
    segments = Segments.from_ids(torch.ones(1, 3, dtype=torch.int64), prefix_len=torch.full((1, 3), 2))
    with pytest.raises(ConfigError, match="only earlier keys"):
        build(FIXED["xpos"])(tokens(1, 3), segments=segments)
    build(FIXED["alibi"])(tokens(1, 3), segments=segments)


# -- ALiBi -------------------------------------------------------------------------------------------------------------


def by_bias(mixer, x, slopes, seen):
    """torch's attention over one document (t d) with the bias written out."""
    at = torch.arange(len(x))
    heads = (p(x).unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    q, k, v = heads
    k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf)[None])
    return mixer.out_proj(y[0].transpose(0, 1).flatten(-2))


@pytest.mark.parametrize("heads", [(4, 2), (6, 6), (6, 1)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_is_an_explicit_bias(heads, window, causal):
    n, g = heads
    mixer = build({"type": "alibi"}, n_heads=n, n_kv_heads=g, window=window, causal=causal)
    slopes = torch.tensor({4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}[n], dtype=F64)
    docs = [tokens(n) for n in (7, 1, 13)]
    x = torch.cat(docs)[None].requires_grad_()
    y = mixer(x, segments=Segments.from_lengths([[7, 1, 13]]))[0]
    weight = torch.randn_like(y)
    wants, grads = [], []
    for doc in docs:
        doc = doc.clone().requires_grad_()
        at = torch.arange(len(doc))
        ahead = at[:, None] - at
        seen = (ahead >= 0) if causal else torch.ones_like(ahead, dtype=torch.bool)
        seen = seen if window is None else seen & (ahead.abs() < window)
        wants.append(by_bias(mixer, doc, slopes, seen))
        start = sum(map(len, wants[:-1]))
        grads.append(torch.autograd.grad((wants[-1] * weight[0, start : start + len(doc)]).sum(), doc)[0])
    torch.testing.assert_close(y[0], torch.cat(wants), rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.autograd.grad((y * weight).sum(), x)[0][0], torch.cat(grads), rtol=0, atol=1e-11)


def test_alibi_and_a_kernel_that_has_no_bias():
    with pytest.raises(KernelError, match=r"kernel 'flash' cannot run.*slopes"):
        build({"type": "alibi"}, kernel="flash")


def test_what_looks_both_ways_holds_no_state():
    mixer = build({"type": "alibi"}, causal=False)
    with pytest.raises(StateError, match="both ways"):
        mixer(tokens(1, 3), state=build({"type": "alibi"}).init_state(1))


# -- the kit -----------------------------------------------------------------------------------------------------------

KIT = {
    "rope, partial, neighbours": FIXED["rope, partial, neighbours"], "none": FIXED["none"], "xpos": FIXED["xpos"],
    "alibi": FIXED["alibi"], "yarn": FIXED["yarn"],
    "dynamic ntk": scaled(type="dynamic_ntk", factor=2.0, original_max_len=8),
    "longrope": scaled(type="longrope", **{**LONG, "original_max_len": 20}),
    "dynamic ntk, running": scaled(type="dynamic_ntk", factor=2.0, original_max_len=8, mode="running"),
    "longrope, running": scaled(type="longrope", **{**LONG, "original_max_len": 8, "mode": "running"}),
}
"""With trained lengths that the kit's inputs pass (or, for the switch of longrope, stay below with ``max_len``)."""


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", KIT)
def test_every_law_holds_with_every_position(name, window):
    config = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=HEAD, position=KIT[name], window=window)
    results = run_checks("mixers", config)
    assert not [f"{r.law}: {r.message}" for r in results if not r.ok]
    assert {r.law for r in results if r.skipped} == ({"cut", "crop"} if "running" in name else set())
