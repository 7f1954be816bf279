"""Stick-breaking layers, with fla's reference in the middle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import Segments
from hybridtf.mixers import StickBreakingConfig
from tests.mixers.plain_parts import built, given, same
from tests.peers import peer


def layer(mixer, x):
    naive = peer("fla/ops/stickbreaking_attn/naive.py").naive_stickbreaking_attn
    projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    q, k, v = (F.linear(x, p.weight, p.bias).unflatten(-1, (-1, mixer.head_dim)) for p in projections)
    y, left = naive(q, k, v, attend_current=mixer.config.attend_current)
    if mixer.config.remainder == "value":
        y = y + left[..., None] * v.repeat_interleave(mixer.n_heads // mixer.n_kv_heads, 2)
    if mixer.config.remainder == "bias":
        y = y + left[..., None] * mixer.left_bias
    return y.flatten(2) @ mixer.out_proj.weight.mT


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("remainder", ["drop", "value", "bias"])
def test_the_layer(remainder, attend_current):
    config = StickBreakingConfig(
        n_heads=6, n_kv_heads=3, head_dim=5, remainder=remainder, attend_current=attend_current, qkv_bias=remainder != "bias"
    )
    mixer = built(config, 7)
    x = given(2, 11, 7)
    same(mixer(x)[0], layer(mixer, x), x, mixer)


def test_a_packed_document_is_as_alone():
    mixer = built(StickBreakingConfig(n_heads=2, head_dim=4, remainder="value", qkv_bias=True), 6)
    x = given(1, 9, 6)
    y = mixer(x, segments=Segments.from_ids(torch.tensor([[1, 1, 1, 0, 2, 2, 0, 2, 2]])))[0]
    at = [4, 5, 7, 8]
    torch.testing.assert_close(y[:, at], layer(mixer, x[:, at]), rtol=0, atol=1e-12)
