"""RWKV-4's mixers against transformers, whose layers hold the same weights; the later channel mixers from their papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward, RwkvSelfAttention

from hybridtf.channel_mixers import RWKV4ChannelConfig, RWKV6ChannelConfig, RWKV7ChannelConfig
from hybridtf.core import BuildContext
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import RWKV4Config
from tests.mixers.plain_parts import built, given, same, shifted

WIDTH, INNER = 7, 9


def theirs(cls, names: dict[str, str], mixer, x):
    """Their layer's output, computed from our parameters."""
    layer = cls(RwkvConfig(hidden_size=WIDTH, attention_hidden_size=INNER, intermediate_size=INNER, num_hidden_layers=2))
    layer = layer.to(torch.float64)
    ours = dict(mixer.named_parameters())
    weights = {name: ours[names[name]].view(param.shape) for name, param in layer.named_parameters()}
    with StrictFloat64():
        return functional_call(layer, weights, (x,))[0]


@pytest.mark.parametrize("t", [3, 5, 23])  # the decay first matters to the third token
def test_time_mixing_is_that_of_transformers(t: int) -> None:
    mixer, x = built(RWKV4Config(d_inner=INNER, chunk_size=4), WIDTH), given(3, t, WIDTH)
    names = {
        "key.weight": "k_proj.weight", "value.weight": "v_proj.weight", "receptance.weight": "r_proj.weight",
        "output.weight": "out_proj.weight", "time_mix_key": "mix_k", "time_mix_value": "mix_v",
        "time_mix_receptance": "mix_r", "time_decay": "time_decay", "time_first": "time_first",
    }
    same(mixer(x)[0], theirs(RwkvSelfAttention, names, mixer, x), x, mixer)


def test_channel_mixing_is_that_of_transformers() -> None:
    mixer, x = built(RWKV4ChannelConfig(d_ff=INNER), WIDTH), given(3, 11, WIDTH)
    names = {
        "key.weight": "up_proj.weight", "value.weight": "down_proj.weight", "receptance.weight": "r_proj.weight",
        "time_mix_key": "mix_k", "time_mix_receptance": "mix_r",
    }
    same(mixer(x)[0], theirs(RwkvFeedForward, names, mixer, x), x, mixer)


@pytest.mark.parametrize("config", [RWKV6ChannelConfig, RWKV7ChannelConfig])
def test_later_channel_mixers_move_to_the_token_before(config) -> None:
    mixer, x = built(config(d_ff=INNER), WIDTH), given(3, 11, WIDTH)
    delta = shifted(x) - x
    expected = torch.relu((x + delta * mixer.mix_k) @ mixer.up_proj.weight.T).pow(2) @ mixer.down_proj.weight.T
    if mixer.r_proj is not None:
        expected = torch.sigmoid((x + delta * mixer.mix_r) @ mixer.r_proj.weight.T) * expected
    same(mixer(x)[0], expected, x, mixer)


def test_starts_of_the_paper() -> None:
    """Appendix on initialisation: of a layer in the middle of three."""
    mixer = RWKV4Config().build(BuildContext(d_model=6, layer_idx=1, n_layers=3))
    share = torch.arange(6) / 6
    torch.testing.assert_close(mixer.mix_k.detach(), share ** (2 / 3))
    torch.testing.assert_close(mixer.mix_v.detach(), share ** (2 / 3) + 0.15)
    torch.testing.assert_close(mixer.mix_r.detach(), share ** (1 / 3))
    torch.testing.assert_close(mixer.time_decay.detach(), -5 + 8 * (torch.arange(6) / 5) ** 1.35)
    zigzag = torch.tensor([0.0, 0.5, -0.5, 0.0, 0.5, -0.5])
    torch.testing.assert_close(mixer.time_first.detach(), math.log(0.3) + zigzag)


@pytest.mark.parametrize(("config", "d_ff"), [(RWKV4ChannelConfig, 32), (RWKV6ChannelConfig, 28), (RWKV7ChannelConfig, 32)])
def test_widths_that_are_not_given(config, d_ff: int) -> None:
    assert config().build(BuildContext(d_model=8)).up_proj.out_features == d_ff
