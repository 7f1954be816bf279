"""Kinds of fault that users of this field's libraries have met, on whole models."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, reorder
from hybridtf.mixers import AttentionConfig, Mamba2Config
from hybridtf.models import LanguageModelConfig

F64 = torch.float64


def model():
    blocks = {
        "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}},
        "w": {"mixer": {"type": "sliding_attention", "n_heads": 2, "window": 4}},
        "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},
    }
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern="m a w", blocks=blocks)
    return config.build(BuildContext(d_model=16, param_dtype=F64)).eval()


@torch.no_grad()
def test_reordered_beams_go_on_like_reordered_prompts():
    net, ids = model(), torch.randint(0, 17, (3, 5))
    index = torch.tensor([2, 0, 0])
    state = reorder(net(ids, state=net.init_state(3, 9)).state, index)
    step = torch.randint(0, 17, (3, 1))
    want = net(torch.cat([ids[index], step], 1)).logits[:, -1:]
    torch.testing.assert_close(net(step, state=state).logits, want, rtol=0, atol=1e-12)


@torch.no_grad()
def test_rows_are_filtered_before_any_token_down_to_one_and_to_none():
    net, ids = model(), torch.randint(0, 17, (3, 10))
    state = reorder(net.init_state(3), torch.tensor([0, 2]))
    state = net(ids[[0, 2], :9], state=state).state
    one = net(ids[2:, 9:], state=reorder(state, torch.tensor([1])))
    torch.testing.assert_close(one.logits, net(ids[2:]).logits[:, 9:], rtol=0, atol=1e-12)
    none = reorder(one.state, torch.zeros(0, dtype=torch.int64))
    assert net(ids[:0, :1], state=none).logits.shape == (0, 1, 17)


@torch.no_grad()
def test_steps_from_two_fresh_states_are_bit_equal():
    net, ids = model(), torch.randint(0, 17, (1, 10))

    def steps():
        state, out = net.init_state(1, max_len=10), []
        for t in range(10):
            result = net(ids[:, t : t + 1], state=state)
            state = result.state
            out.append(result.logits)
        return torch.cat(out, 1)

    first = steps()
    assert torch.equal(first, steps())
    torch.testing.assert_close(first, net(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_model", [12, 20, 36, 52])
@pytest.mark.parametrize("head_dim", [5, 6, 7, 10])
def test_odd_widths_and_inputs_that_are_not_contiguous(d_model, head_dim):
    ctx = BuildContext(d_model=d_model, param_dtype=F64)
    x = torch.randn(2, d_model, 9, dtype=F64).transpose(1, 2)
    plain = {"type": "none"}
    for config in (
        AttentionConfig(n_heads=3, head_dim=head_dim, position=plain), Mamba2Config(n_heads=3, head_dim=head_dim, d_state=3),
    ):
        mixer = config.build(ctx)
        torch.testing.assert_close(mixer(x)[0], mixer(x.contiguous())[0], rtol=0, atol=1e-12)
    if head_dim % 2:
        with pytest.raises(ConfigError, match="must be even"):
            AttentionConfig(n_heads=3, head_dim=head_dim).build(ctx)
    else:
        assert AttentionConfig(n_heads=3, head_dim=head_dim).build(ctx)(x)[0].shape == (2, 9, d_model)
