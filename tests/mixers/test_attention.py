"""The attention mixer against a plain per-token loop, option by option."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, KernelError, Segments, StateError
from hybridtf.mixers import AttentionConfig, TiledAttentionConfig
from tests.mixers.plain_parts import built, given, same

D = 12
OPTIONS = {
    "plain": {"n_heads": 3},
    "gqa, wide heads": {"n_heads": 6, "n_kv_heads": 2, "head_dim": 10},
    "mqa": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 6},
    "window": {"n_heads": 2, "window": 4},
    "window 1": {"n_heads": 2, "window": 1},
    "qk norm": {"n_heads": 2, "qk_norm": {"type": "rms_norm"}},
    "qk norm over all heads": {
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "qk_norm": {"type": "rms_norm"}, "qk_norm_over": "heads",
    },
    "gate": {"n_heads": 2, "output_gate": True},
    "gate of each head": {"n_heads": 3, "output_gate": True, "output_gate_per": "head"},
    "softplus gate": {"n_heads": 3, "output_gate": True, "output_gate_activation": "softplus"},
    "softplus gate of each head": {
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "output_gate": True, "output_gate_per": "head",
        "output_gate_activation": "softplus",
    },
    "narrow values": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "v_dim": 5, "value_scale": 0.7, "output_gate": True},
    "wide values, window": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "v_dim": 7, "window": 4, "sinks": True},
    "softcap": {"n_heads": 2, "softcap": 1.5},
    "sinks": {"n_heads": 3, "sinks": True},
    "window, sinks, softcap": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": 3, "sinks": True, "softcap": 2.0},
    "biases and scale": {"n_heads": 2, "qkv_bias": True, "out_bias": True, "scale": 0.7},
    "nope": {"n_heads": 2, "position": {"type": "none"}},
}


def build(seed=0, **options):
    mixer = AttentionConfig(**options).build(BuildContext(d_model=D, param_dtype=torch.float64, seed=seed))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) * 0.3)
    return mixer.eval()


def by_hand(mixer, x):
    """One row (t d), one token and one head at a time."""
    config, hd, positions = mixer.config, mixer.head_dim, torch.arange(len(x))[None]
    heads = lambda y, n: y.view(1, len(x), n, -1)  # noqa: E731
    q, k, v = (heads(p(x), n) for p, n in (
        (mixer.q_proj, config.n_heads), (mixer.k_proj, mixer.n_kv_heads), (mixer.v_proj, mixer.n_kv_heads)))
    if mixer.q_norm is not None:
        wide = config.qk_norm_over == "heads"
        q, k = (norm(y.flatten(-2)).view(y.shape) if wide else norm(y) for norm, y in ((mixer.q_norm, q), (mixer.k_norm, k)))
    if mixer.position is not None:
        table = mixer.position.table(positions, x.dtype)
        q, k = mixer.position(q, table), mixer.position(k, table)
    rows = []
    for t in range(len(x)):
        out = []
        for h in range(config.n_heads):
            g = h // (config.n_heads // mixer.n_kv_heads)
            first = 0 if config.window is None else max(0, t - config.window + 1)
            scores = k[0, first : t + 1, g] @ q[0, t, h] * (config.scale or hd**-0.5)
            if config.softcap:
                scores = config.softcap * torch.tanh(scores / config.softcap)
            extra = [mixer.sinks[h : h + 1]] if mixer.sinks is not None else []
            weights = torch.cat([scores, *extra]).softmax(0)[: t + 1 - first]
            out.append(weights @ v[0, first : t + 1, g])
        y = torch.cat(out) * config.value_scale
        if mixer.gate_proj is not None:
            act = torch.sigmoid if config.output_gate_activation == "sigmoid" else lambda z: (1 + z.exp()).log()
            gate = act(mixer.gate_proj(x[t]))
            y = y * (gate if config.output_gate_per == "channel" else gate.repeat_interleave(mixer.v_dim))
        rows.append(y)
    return mixer.out_proj(torch.stack(rows))


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_gradients_equal_the_plain_loop(name):
    mixer = build(**OPTIONS[name])
    x = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, D, dtype=torch.float64)
    params = [x, *mixer.parameters()]
    got = mixer(x[None])[0][0]
    want = by_hand(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("max_len", [None, 20])
@torch.no_grad()
def test_ragged_batch_prefilled_in_pieces_then_decoded(name, max_len):
    mixer = build(**OPTIONS[name])
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (13, 6, 9)]
    want = [mixer(row[None])[0][0] for row in rows]
    prompts = [9, 2, 5]
    x = torch.full((3, 9, D), 1e3, dtype=torch.float64)  # what lies at pads must not matter
    real = torch.zeros(3, 9, dtype=torch.bool)
    for i, n in enumerate(prompts):
        x[i, :n], real[i, :n] = rows[i][:n], True
    state = mixer.init_state(3, max_len)
    segments = Segments.from_mask(real)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        y, state = mixer(x[:, start:stop], segments=segments.narrow(start, stop), state=state)
        for i, n in enumerate(prompts):
            torch.testing.assert_close(y[i, : max(0, n - start)], want[i][start : min(n, stop)], rtol=0, atol=1e-11)
    for step in range(4):
        x = torch.stack([rows[i][n + step] for i, n in enumerate(prompts)])[:, None]
        y, state = mixer(x, state=state)
        torch.testing.assert_close(y[:, 0], torch.stack([want[i][n + step] for i, n in enumerate(prompts)]), rtol=0, atol=1e-11)


def test_dropout_follows_the_mode():
    mixer = build(n_heads=2, dropout=0.5)
    plain = build(n_heads=2)
    x = torch.randn(1, 8, D, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], plain(x)[0])
    mixer.train()
    first = mixer(x)[0]
    mixer.eval()(x)
    mixer.train()
    assert not torch.equal(mixer(x)[0], first)
    assert not torch.equal(mixer(x)[0], mixer(x)[0])


def test_bidirectional_sees_both_ways_and_has_no_state():
    mixer = AttentionConfig(n_heads=2).build(BuildContext(d_model=D, param_dtype=torch.float64, causal=False))
    x = torch.randn(1, 6, D, dtype=torch.float64)
    changed = x.clone()
    changed[0, 5] += 1
    assert (mixer(x)[0][0, 0] - mixer(changed)[0][0, 0]).abs().max() > 1e-6
    causal = AttentionConfig(n_heads=2).build(BuildContext(d_model=D, param_dtype=torch.float64))
    with pytest.raises(StateError, match="both ways"):
        mixer(x, state=causal.init_state(1))


def test_flash_is_pinned_and_refuses_with_the_reason():
    mixer = build(n_heads=2, kernel="flash")
    assert set(mixer.attention.chosen.values()) == {"flash"}
    torch.testing.assert_close(mixer(x := torch.randn(2, 9, D, dtype=torch.float64))[0], build(n_heads=2)(x)[0])
    with pytest.raises(KernelError, match=r"attention: kernel 'flash' cannot run.*softcap.*Can run here: .*torch"):
        build(n_heads=2, kernel="flash", softcap=2.0)


def test_wrong_options_are_refused_when_built():
    with pytest.raises(ConfigError, match="n_heads = 4 is not divisible by n_kv_heads = 3"):
        AttentionConfig(n_heads=4, n_kv_heads=3)
    with pytest.raises(ConfigError, match=r"head_dim 5 x fraction 1\.0"):
        build(n_heads=2, head_dim=5)
    with pytest.raises(ConfigError, match="no kernel named 'flsh'"):
        build(n_heads=2, kernel="flsh")


@pytest.mark.parametrize("t", [2, 37])
def test_attention_by_tiles_is_that_of_torch(t):
    config = TiledAttentionConfig(n_heads=4, n_kv_heads=2, head_dim=5, position={"type": "none"})
    mixer, x = built(config, D), given(2, t, D)
    q, k, v = (p(x).unflatten(-1, (-1, 5)).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    same(mixer(x)[0], mixer.out_proj(y.transpose(1, 2).flatten(2)), x, mixer)
