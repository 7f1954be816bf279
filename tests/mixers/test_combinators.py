"""Mixers of mixers against the same thing said by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigError, Segments, SequenceMixerConfig, StateError, active
from hybridtf.mixers import (
    BidirectionalConfig,
    LoraMixerConfig,
    MetaTokensConfig,
    MultiScaleConfig,
    ParallelMixersConfig,
)
from hybridtf.nn import RMSNormConfig


def tiny(name: str) -> SequenceMixerConfig:
    config: Any = active()["mixers"].get(name).tiny()
    return config


def build(config: SequenceMixerConfig, causal: bool = True) -> Any:
    return config.build(BuildContext(d_model=16, causal=causal, param_dtype=torch.float64, seed=3))


def draw(b: int, t: int) -> Tensor:
    return torch.randn(b, t, 16, generator=torch.Generator().manual_seed(t), dtype=torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_parallel_is_the_scaled_sum_of_its_branches() -> None:
    config = ParallelMixersConfig(
        branches=(tiny("attention"), tiny("mamba2"), tiny("gru")), combine="mean", norm=RMSNormConfig(),
        in_scale=(1.0, 0.5, 2.0), out_scale=(0.3, 1.0, 3.0),
    )
    mixer, x = build(config), draw(2, 9)
    parts = [
        mixer.norms[i](mixer.get_submodule(f"branch{i}")(x * s)[0]) * o
        for i, (s, o) in enumerate(zip((1.0, 0.5, 2.0), (0.3, 1.0, 3.0), strict=True))
    ]
    same(mixer(x)[0], sum(parts) / 3)
    with pytest.raises(ConfigError, match="out_scale has 2 numbers for 3 branches"):
        ParallelMixersConfig(branches=config.branches, out_scale=(1.0, 2.0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "rg_lru", "gru", "attention", "linear_attention", "mamba"])
def test_bidirectional_reads_each_document_both_ways(name: str, shared: bool) -> None:
    mixer, x = build(BidirectionalConfig(mixer=tiny(name), shared=shared), causal=False), draw(1, 11)
    ahead, back = mixer.mixer, mixer.mixer if shared else mixer.backward_mixer
    documents = [x[:, :4], x[:, 5:9], x[:, 9:]]
    expected = [ahead(d)[0] + back(d.flip(1))[0].flip(1) for d in documents]
    found = mixer(x, segments=Segments.from_ids(torch.tensor([[1, 1, 1, 1, 0, 2, 2, 2, 2, 3, 3]])))[0]
    for part, at in zip(expected, (slice(0, 4), slice(5, 9), slice(9, 11)), strict=True):
        same(found[:, at], part)


def test_bidirectional_refuses_what_it_cannot_be() -> None:
    config = BidirectionalConfig(mixer=tiny("mamba2"))
    with pytest.raises(ConfigError, match="looks ahead, and this stack is causal"):
        build(config)
    with pytest.raises(StateError, match="give it whole documents"):
        build(config, causal=False)(draw(1, 3), state=build(tiny("mamba2")).init_state(1))


@pytest.mark.parametrize("combine", ["mean", "concat", "gated"])
def test_ways_to_combine(combine: Any) -> None:
    mixer, x = build(BidirectionalConfig(mixer=tiny("rg_lru"), combine=combine), causal=False), draw(2, 5)
    f, g = mixer.mixer(x)[0], mixer.backward_mixer(x.flip(1))[0].flip(1)
    share = torch.sigmoid(mixer.gate_proj(x)) if combine == "gated" else torch.tensor(0.5)
    joined = mixer.out_proj(torch.cat([f, g], -1)) if combine == "concat" else share * f + (1 - share) * g
    same(mixer(x)[0], joined)


@pytest.mark.parametrize("name", ["attention", "mamba2"])
def test_meta_tokens_come_before_every_document(name: str) -> None:
    mixer, x = build(MetaTokensConfig(mixer=tiny(name), n_tokens=3)), draw(2, 8)

    def alone(document: Tensor) -> Tensor:
        joined = torch.cat([mixer.tokens.expand(len(document), -1, -1), document], 1)
        y: Tensor = mixer.mixer(joined)[0][:, 3:]
        return y

    same(mixer(x)[0], alone(x))
    ids = torch.tensor([[0, 1, 1, 2, 0, 2, 3, 3], [1, 1, 1, 1, 1, 1, 0, 0]])
    y, state = mixer(x, segments=Segments.from_ids(ids), state=mixer.init_state(2))
    same(y[:1, 1:3], alone(x[:1, 1:3]))
    same(y[:1, [3, 5]], alone(x[:1, [3, 5]]))
    same(y[1:, :6], alone(x[1:, :6]))
    more = draw(2, 2)
    y, _ = mixer(more, state=state)
    same(y[:1], alone(torch.cat([x[:1, 6:], more[:1]], 1))[:, 2:])
    same(y[1:], alone(torch.cat([x[1:, :6], more[1:]], 1))[:, 6:])


def test_multi_scale_reads_the_last_whole_block() -> None:
    mixer = build(MultiScaleConfig(mixer=tiny("mamba2"), scales=(1, 3, 4)))
    with torch.no_grad():
        mixer.scale_gain.normal_(generator=torch.Generator().manual_seed(0))
    x = draw(2, 14)
    expected = torch.zeros_like(x)
    for i, s in enumerate((1, 3, 4)):
        means = torch.stack([x[:, j * s : j * s + s].mean(1) for j in range(14 // s)], 1)
        outputs = mixer.get_submodule(f"scale{s}")(means)[0]
        for t in range(14):
            if (t + 1) // s:
                expected[:, t] += mixer.scale_gain[i] * outputs[:, (t + 1) // s - 1]
    same(mixer(x)[0], expected)
    with pytest.raises(ConfigError, match="rising numbers"):
        MultiScaleConfig(mixer=tiny("mamba2"), scales=(4, 2))


def test_lora_starts_as_its_mixer_and_merges_into_it() -> None:
    plain, x = build(tiny("attention")), draw(2, 6)
    lora = build(LoraMixerConfig(mixer=tiny("attention"), rank=2, alpha=6.0, on=("q_proj", "v_proj")))
    lora.mixer.load_state_dict(plain.state_dict(), strict=False)
    same(lora(x)[0], plain(x)[0])
    learned = {name for name, p in lora.named_parameters() if p.requires_grad}
    assert learned == {f"mixer.{p}.low_rank.{w}.weight" for p in ("q_proj", "v_proj") for w in ("down", "up")}
    with torch.no_grad():
        for name in learned:
            lora.get_parameter(name).normal_(generator=torch.Generator().manual_seed(1))
    before = lora(x)[0]
    assert not torch.allclose(before, plain(x)[0])
    added = lora.mixer.q_proj.low_rank.up.weight @ lora.mixer.q_proj.low_rank.down.weight * 3.0
    lora.merge()
    same(lora(x)[0], before)
    assert type(lora.mixer.q_proj) is nn.Linear
    same(lora.mixer.q_proj.weight, plain.q_proj.weight + added)
    with pytest.raises(ConfigError, match=r"no projection named 'q_prj'.*Did you mean 'q_proj'"):
        build(LoraMixerConfig(mixer=tiny("attention"), on=("q_prj",)))
