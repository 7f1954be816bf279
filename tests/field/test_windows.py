"""Windows of attention: how many tokens they show, what their rolling state holds, lengths that do not divide."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import Ring, Segments
from hybridtf.testing.compare import close_rows
from tests.field.layers import F64, mixer, same, solo, steps


def averaging(t: int, **options):
    """Attention with equal weights whose output says which positions were seen: column s is the weight of token s."""
    layer = mixer("attention", d_model=t, n_heads=1, n_kv_heads=1, head_dim=t, position={"type": "none"}, **options)
    with torch.no_grad():
        for proj, weight in ((layer.q_proj, 0), (layer.k_proj, 0), (layer.v_proj, 1), (layer.out_proj, 1)):
            proj.weight.copy_(weight * torch.eye(t))
    return layer


@pytest.mark.parametrize("kernel", ["reference", "torch"])
@torch.no_grad()
def test_a_window_counts_the_token_itself_in_every_path(kernel):
    layer = averaging(10, window=4, kernel=kernel)
    x = torch.eye(10, dtype=F64)[None]
    want = torch.zeros(1, 10, 10, dtype=F64)
    for t in range(10):
        want[0, t, max(0, t - 3) : t + 1] = 1 / min(4, t + 1)
    same(layer(x)[0], want)
    same(solo(layer, x)[0], want)
    same(steps(layer, x, layer.init_state(1))[0], want)
    for first in range(1, 10):
        y, state = solo(layer, x[:, :first])
        same(torch.cat([y, layer(x[:, first:], state=state)[0]], 1), want)
        same(torch.cat([y, steps(layer, x[:, first:], solo(layer, x[:, :first])[1])[0]], 1), want)


@pytest.mark.parametrize("sizes", [[6, *[1] * 6], [8, *[1] * 4], [7, 3, 3, 3]])
@torch.no_grad()
def test_the_rolling_state_holds_the_last_tokens_in_order(sizes):
    ring = Ring.empty(1, {"k": ()}, window=8, dtype=F64, device="cpu")
    done = 0
    for n in sizes:
        ring = ring.push({"k": torch.arange(done, done + n, dtype=F64)[None]}, None)
        done += n
        order = ring.positions()[0].argsort()
        held = ring["k"][0, order][ring.valid()[0, order]]
        assert held.tolist() == list(range(max(0, done - 8), done))
        assert ring.length.tolist() == [done]


def dense(layer, x: torch.Tensor, window: int | None) -> torch.Tensor:
    """The layer's attention (no positions) with its mask written out."""
    heads, width = layer.config.n_heads, layer.head_dim
    q, k, v = (proj(x).unflatten(-1, (-1, width)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v = (z.repeat_interleave(heads // z.shape[1], 1) for z in (k, v))
    ahead = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(~seen, -torch.inf)
    return layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("window", [4, 8, 100])
@torch.no_grad()
def test_a_window_over_all_tokens_is_full_attention(window):
    layer, full = (mixer("attention", position={"type": "none"}, **more) for more in ({"window": window}, {}))
    full.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, 16, dtype=F64)
    same(layer(x)[0], dense(layer, x, window))
    assert torch.allclose(layer(x)[0], full(x)[0], rtol=0, atol=1e-12) == (window >= 8)


@pytest.mark.parametrize("window", [4, 8, 100])
@torch.no_grad()
def test_no_query_sees_more_keys_than_its_window(window):
    y = averaging(16, window=window)(torch.eye(16, dtype=F64)[None])[0][0]
    assert ((y > 0).sum(-1) == (torch.arange(16) + 1).clamp(max=window)).all()


@pytest.mark.parametrize("t", [1, 2, 7, 8, 9, 31])
@torch.no_grad()
def test_lengths_that_the_window_does_not_divide(t):
    layer = mixer("attention", window=8, position={"type": "none"})
    x = torch.randn(3, t, 16, dtype=F64)
    y, state = solo(layer, x)
    same(y, dense(layer, x, 8))
    for row in range(3):
        alone, one = solo(layer, x[row : row + 1])
        same(y[row : row + 1], alone)
        close_rows(state, row, one, 0, tol=1e-10, what=f"row {row}")
    mask = torch.arange(t) < torch.tensor([[t], [max(1, t - 1)], [t // 2]])
    ragged = layer(x, segments=Segments.from_mask(mask))[0]
    for row, n in enumerate(mask.sum(1).tolist()):
        same(ragged[row : row + 1, :n], dense(layer, x[row : row + 1, :n], 8))
