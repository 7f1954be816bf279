"""Experts looked up by token id: the table, how it is drawn and kept, in layers and in models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.channel_mixers import MoEConfig
from hybridtf.core import BuildContext, ConfigError, Segments, active
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate

D, VOCAB, F64 = 8, 11, torch.float64
OPTIONS = {"n_experts": 5, "top_k": 2, "d_ff": 6, "choice": "token_id", "scores": "sqrt_softplus"}


def build(**options):
    return MoEConfig(**{**OPTIONS, **options}).build(BuildContext(d_model=D, vocab_size=VOCAB, param_dtype=F64))


def model(**options):
    blocks = {"a": {
        "mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "moe", **OPTIONS, **options},
    }}
    return LanguageModelConfig(vocab_size=VOCAB, d_model=D, pattern="a*2", blocks=blocks).build(
        BuildContext(d_model=D, param_dtype=F64)
    )


def test_a_token_goes_where_the_table_sends_its_id():
    generator = torch.Generator().manual_seed(0)
    mixer = build(d_ff_shared=4)
    with torch.no_grad():
        for param in mixer.parameters():
            if param.is_floating_point():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=F64))
        mixer.table.experts[3] = torch.tensor([2, 2])  # as published tables may have it
    x, ids = torch.randn(2, 4, D, generator=generator, dtype=F64), torch.tensor([[3, 0, 10, 3], [1, 1, 3, 7]])
    got, e = mixer(x, edges={"token_ids": ids})[0], mixer.experts
    for row, token in [(0, 0), (0, 2), (1, 1)]:
        one = x[row, token]
        chosen = mixer.table.experts[ids[row, token]].tolist()
        scores = F.softplus(mixer.router.weight @ one).sqrt()[chosen]
        want = mixer.shared(one[None, None])[0][0, 0]
        for weight, i in zip(scores / scores.sum(), chosen, strict=True):
            want = want + weight * ((F.silu(one @ e.gate_proj[i]) * (one @ e.up_proj[i])) @ e.down_proj[i])
        torch.testing.assert_close(got[row, token], want, rtol=1e-10, atol=1e-12)


def test_the_table_is_drawn_once_and_never_trained():
    lm, again = model(), model()
    tables = [layer.channel_mixer.table.experts for layer in lm.stack.blocks()]
    assert all(len(set(row)) == 2 for row in tables[0].tolist())
    assert tables[0].dtype == torch.int64
    assert not torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], again.stack.blocks()[0].channel_mixer.table.experts)
    loss = lm.loss(torch.arange(10)[None], torch.arange(1, 11)[None]).mean()
    loss.backward()
    assert not any(table.requires_grad for table in tables)
    assert lm.stack.blocks()[0].channel_mixer.router.weight.grad.any()
    assert lm.to(torch.bfloat16).stack.blocks()[0].channel_mixer.table.experts.dtype == torch.int64


@torch.no_grad()
def test_in_a_model_documents_and_steps_are_as_alone():
    lm = model(n_identity=2).eval()
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    want = lm(ids).logits
    packed = lm(ids.reshape(1, 18), segments=Segments.from_lengths([[9, 9]])).logits
    torch.testing.assert_close(packed.view(2, 9, -1), want, rtol=0, atol=1e-12)
    state, steps = lm.init_state(2), []
    for i in range(9):
        out = lm(ids[:, i : i + 1], state=state)
        state = out.state
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=0, atol=1e-12)
    assert len(generate(lm, [[1, 2, 3]], GenerationConfig(max_new_tokens=4))[0]) == 4


def test_where_there_are_no_tokens_it_says_so():
    with pytest.raises(ConfigError, match="this model has none"):
        MoEConfig(**OPTIONS).build(BuildContext(d_model=D))
    with pytest.raises(ConfigError, match="token_ids"):
        build()(torch.zeros(1, 2, D, dtype=F64))


def test_behind_additions_and_a_convolution_the_ids_are_handed_on():
    make = active()["channel_mixers"].make
    inner, ids = {"type": "moe", **OPTIONS}, torch.tensor([[1, 2, 3]])
    x, ctx = torch.randn(1, 3, D, dtype=F64), BuildContext(d_model=D, vocab_size=VOCAB, param_dtype=F64)
    for outer in ({"type": "lora", "rank": 2, "on": ("router",)}, {"type": "convolved"}):
        mixer = make({**outer, "channel_mixer": inner}).build(ctx)
        assert mixer.reads == ("token_ids",)
        assert mixer(x, edges={"token_ids": ids})[0].shape == x.shape
