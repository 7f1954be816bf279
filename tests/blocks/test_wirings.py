from __future__ import annotations

import pytest
import torch

from hybridtf.blocks import ParallelConfig, PreNormConfig
from hybridtf.core import BuildContext, ConfigError
from hybridtf.nn import DropPath

CTX = BuildContext(d_model=8, param_dtype=torch.float64)
PARTS = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
X = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_prenorm_is_two_residual_branches():
    block = PreNormConfig(**PARTS).build(CTX)
    y = X + block.mixer(block.mixer_norm(X))[0]
    y = y + block.channel_mixer(block.channel_norm(y))[0]
    torch.testing.assert_close(block(X, {}).x, y)


@pytest.mark.parametrize("shared", [True, False])
def test_parallel_branches_read_the_same_input(shared):
    block = ParallelConfig(**PARTS, shared_norm=shared).build(CTX)
    norms = [name for name, _ in block.named_parameters() if "norm" in name]
    assert len(norms) == (1 if shared else 2)
    second = block.mixer_norm if shared else block.channel_norm
    want = X + block.mixer(block.mixer_norm(X))[0] + block.channel_mixer(second(X))[0]
    torch.testing.assert_close(block(X, {}).x, want)


def test_what_a_block_must_have():
    with pytest.raises(ConfigError, match="a mixer, a channel_mixer, or both"):
        PreNormConfig()
    with pytest.raises(ConfigError, match="needs both a mixer and a channel_mixer"):
        ParallelConfig(mixer=PARTS["mixer"])


def test_dropout_and_drop_path_only_in_training():
    for options in ({"dropout": 0.5}, {"drop_path": 0.5}):
        block = PreNormConfig(**PARTS, **options).build(CTX)
        plain = PreNormConfig(**PARTS).build(CTX)
        torch.testing.assert_close(block.eval()(X, {}).x, plain(X, {}).x)
        block.train()
        assert not torch.equal(block(X, {}).x, block(X, {}).x)
        block.eval()
        block.train()
        assert not torch.equal(block(X, {}).x, plain(X, {}).x)


def test_drop_path_drops_whole_rows_and_keeps_the_mean():
    drop = DropPath(0.25).train()
    y = drop(torch.ones(4000, 2, 3))
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 4 / 3]))
    assert bool((y.amax((1, 2)) == y.amin((1, 2))).all())
    assert float(y.mean()) == pytest.approx(1, abs=0.05)


def test_a_causal_only_mixer_is_refused_in_a_stack_that_is_not_causal():
    for name, allowed in (("mamba2", False), ("attention", True)):
        mixer = {"type": "mamba2", "head_dim": 4, "d_state": 4} if name == "mamba2" else PARTS["mixer"]
        config = PreNormConfig(mixer=mixer)
        ctx = BuildContext(d_model=8, causal=False, where="model.blocks.m")
        if allowed:
            config.build(ctx)
        else:
            with pytest.raises(ConfigError, match=r"model\.blocks\.m: mixer 'mamba2' only looks back"):
                config.build(ctx)
