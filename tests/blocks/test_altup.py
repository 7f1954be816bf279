"""Alternating updates, learned residuals and projected streams: by hand, in a model, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hybridtf.blocks import AltUpConfig, AltUpSideConfig, SandwichConfig
from hybridtf.core import BuildContext, ConfigError
from hybridtf.models import LanguageModelConfig
from tests.models.tiny_models import assert_can_be_cut

D, S = 8, 3
CTX = BuildContext(d_model=D, param_dtype=torch.float64)
GLU = {"type": "glu", "d_ff": 12}
LAUREL = {"rank": 2, "norm": {"type": "rms_norm"}}


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def streams():
    return torch.randn(2, 4, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_streams_follow_the_one_that_is_computed():
    block = drawn(AltUpConfig(n_streams=S, active=1, channel_mixer=GLU).build(CTX))
    got, around = block(streams(), {}).x, block.streams
    for x, y in zip(streams().flatten(0, 1), got.flatten(0, 1), strict=True):
        def numbers(z):
            return torch.tanh(around.router @ (around.norm(z) / D))

        table = (around.prediction @ numbers(x[1])).view(S, S)
        p = [x[k] + sum(table[k, j] * x[j] for j in range(S)) for k in range(S)]
        made = p[1] + block.channel_post_norm(block.channel_mixer(block.channel_norm(p[1])[None, None])[0][0, 0])
        take = 1 + around.correction @ numbers(made)
        torch.testing.assert_close(y, torch.stack([p[k] + take[k] * (made - p[1]) for k in range(S)]))


def test_the_others_take_what_one_gives():
    block = drawn(AltUpSideConfig(n_streams=S, active=2, channel_mixer=GLU).build(CTX))
    x = streams()
    added = block.channel_post_norm(block.channel_mixer(x[..., 2, :] * block.read_scale)[0])
    want = torch.stack([x[..., 0, :] + added, x[..., 1, :] + added, x[..., 2, :]], -2)
    torch.testing.assert_close(block(x, {}).x, want)


def test_a_learned_residual_beside_a_branch():
    block = drawn(SandwichConfig(channel_mixer=GLU, laurel={**LAUREL, "on": "both"}, skip_scale=0.5).build(CTX))
    x, laurel = streams()[..., 0, :], block.channel_laurel
    n = block.channel_norm(x)
    low = laurel.norm(n @ laurel.down.weight.T @ laurel.up.weight.T)
    torch.testing.assert_close(block(x, {}).x, 0.5 * x + block.channel_post_norm(block.channel_mixer(n)[0]) + n + low)
    assert not hasattr(SandwichConfig(channel_mixer=GLU, laurel=LAUREL).build(CTX), "channel_laurel")


def model(**options):
    blocks = {
        "a": {
            "type": "altup", "n_streams": S, "mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": GLU,
            "laurel": LAUREL,
        },
        "s": {"type": "altup_side", "n_streams": S, "channel_mixer": GLU},
    }
    options = {"spread": {"type": "projected"}, "merge": {"type": "projected"}, **options}
    return LanguageModelConfig(vocab_size=11, d_model=D, **{"pattern": "(a s)*2", "blocks": blocks, **options}).build().double()


def test_streams_start_and_end_as_large_as_the_first():
    made = drawn(model())
    x = torch.randn(2, 5, D, dtype=torch.float64)

    def size(z):
        return z.square().mean(-1, keepdim=True).sqrt()

    found = made.stack.spread(x)
    torch.testing.assert_close(size(found), size(x)[:, :, None].expand(-1, -1, S, -1))
    torch.testing.assert_close(found[:, :, 0], x)
    y = x @ made.stack.spread.projs[1].weight.T
    torch.testing.assert_close(found[:, :, 2], y / size(y) * size(x))
    back = made.stack.merge(found, {})
    others = [found[:, :, i + 1] @ proj.weight.T for i, proj in enumerate(made.stack.merge.streams.projs)]
    torch.testing.assert_close(back, (x + sum(z / size(z) * size(x) for z in others)) / S)
    assert all(p.grad.isfinite().all() for p in _learnt(made, torch.zeros_like(x)))


def _learnt(made, x):
    made.stack.merge(made.stack.spread(x), {}).sum().backward()
    return [*made.stack.spread.parameters(), *made.stack.merge.parameters()]


def test_a_model_can_be_cut_and_learns():
    made, ids = drawn(model()), torch.randint(0, 11, (2, 7))
    assert_can_be_cut(made, ids, [3, 3, 1], atol=1e-10)
    made.loss(ids, ids).total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in made.parameters())


def test_what_cannot_be():
    with pytest.raises(ValueError, match="active = 3, and there are n_streams = 3, counted from 0"):
        AltUpConfig(n_streams=3, active=3, channel_mixer=GLU)
    one = {"pattern": "a", "blocks": {"a": {"channel_mixer": GLU}}}
    with pytest.raises(ConfigError, match="spread 'projected' is for several residual streams"):
        model(**one, merge=None)
