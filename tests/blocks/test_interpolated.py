"""``interpolated``: the stream moves towards what a branch gives; and nGPT's other learned factors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.channel_mixers import GLUConfig
from hybridtf.core import BuildContext, RecipeError, init_parameters
from hybridtf.mixers import AttentionConfig
from hybridtf.models import LanguageModelConfig
from hybridtf.nn import FactorConfig

F64 = torch.float64
CTX = BuildContext(d_model=8, param_dtype=F64, vocab_size=13)
HALF = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
IDS = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(0))


def drawn(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=F64))
    return module


def x_of(*shape):
    return torch.randn(*shape, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def model(**options):
    blocks = {"a": {"type": "interpolated", **HALF, **options}}
    return LanguageModelConfig(vocab_size=13, d_model=8, pattern="a*2", blocks=blocks).build(CTX)


def test_a_step_towards_the_branch():
    block = drawn(model(rate={"start": 0.2, "stored": 0.5}).stack.blocks()[0])
    x = want = x_of(2, 5)
    for branch, rate in ((block.mixer, block.mixer_rate), (block.channel_mixer, block.channel_rate)):
        n = unit(want)
        want = n + (rate.weight * 0.4).abs() * (unit(branch(n)[0]) - n)
    torch.testing.assert_close(block(x, {}).x, want, rtol=0, atol=1e-12)


def test_rates_start_as_told_and_no_branch_is_silenced():
    lm = model(rate={"start": 0.3, "stored": 0.01})
    block, plain = lm.stack.blocks()[0], GLUConfig(d_ff=12).build(CTX)
    torch.testing.assert_close(block.mixer_rate.value(F64), torch.full((8,), 0.3, dtype=F64), rtol=1e-6, atol=0)
    assert float(block.mixer_rate.weight[0].detach()) == pytest.approx(0.01)
    init_parameters(plain, 0)
    spread = block.channel_mixer.down_proj.weight.std() / plain.down_proj.weight.std()
    assert 0.7 < float(spread.detach()) < 1.4
    lm.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
    assert [name for name, param in lm.named_parameters() if param.grad is None or not param.grad.any()] == []


def test_an_even_factor_of_queries_is_a_scale_of_scores():
    options = {"n_heads": 2, "output_gate": True}
    plain = drawn(AttentionConfig(**options, scale=2.0**-1 * 9.0).build(CTX))
    factor = {"query_factor": FactorConfig(start=3.0), "gate_factor": FactorConfig(start=2.0, stored=4.0)}
    other = AttentionConfig(**options, scale=2.0**-1, **factor).build(CTX)
    init_parameters(other, 0)
    other.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        other.gate_proj.weight.div_(4.0)
    torch.testing.assert_close(other(x_of(2, 6))[0], plain(x_of(2, 6))[0], rtol=0, atol=1e-11)
    with pytest.raises(RecipeError, match="gate_factor"):
        AttentionConfig(n_heads=2, gate_factor=FactorConfig())


def test_a_norm_of_all_heads_side_by_side():
    mixer = drawn(AttentionConfig(n_heads=2, out_norm={"type": "rms_norm"}).build(CTX))
    plain = AttentionConfig(n_heads=2).build(CTX)
    plain.load_state_dict({name: value for name, value in mixer.state_dict().items() if "out_norm" not in name})
    out = mixer.out_proj.weight.clone()
    with torch.no_grad():
        plain.out_proj.weight.copy_(torch.eye(8))
    heads = plain(x_of(1, 6))[0]
    torch.testing.assert_close(mixer(x_of(1, 6))[0], mixer.out_norm(heads) @ out.T, rtol=0, atol=1e-11)


def test_factors_and_a_norm_inside_a_gated_unit():
    factor = {"start": 3.0, "stored": 2.0}
    unit_of = drawn(GLUConfig(d_ff=12, gate_factor=factor, up_factor=factor, inner_norm={"type": "l2_norm"}).build(CTX))
    x, w = x_of(2, 3), dict(unit_of.named_parameters())
    gate = x @ w["gate_proj.weight"].T * w["gate_factor.weight"] * 1.5
    up = x @ w["up_proj.weight"].T * w["up_factor.weight"] * 1.5
    want = unit(F.silu(gate) * up) @ w["down_proj.weight"].T
    torch.testing.assert_close(unit_of(x)[0], want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("tied", [True, False])
def test_a_factor_of_each_token(tied):
    options = {"vocab_size": 13, "d_model": 8, "pattern": "a", "blocks": {"a": HALF}}
    head = {"type": "lm_head", "tied": tied, "scale": 0.5}
    plain = LanguageModelConfig(**options, head=head).build(CTX).eval()
    other = LanguageModelConfig(**options, head={**head, "token_factor": {"start": 1.0, "stored": 0.1}}).build(CTX).eval()
    torch.testing.assert_close(other(IDS).logits, plain(IDS).logits, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        other.head.token_factor.weight.copy_(torch.arange(13) / 10)
    want = plain(IDS).logits * torch.arange(13)
    torch.testing.assert_close(other(IDS).logits, want, rtol=1e-6, atol=1e-7)
