from __future__ import annotations

import pytest
import torch

from hybridtf.blocks import (
    AffineResidualConfig,
    NormedStreamConfig,
    OutputNormConfig,
    ParallelConfig,
    PostNormConfig,
    PreNormConfig,
    SandwichConfig,
)
from hybridtf.core import BuildContext, ConfigError, init_parameters, param_specs
from hybridtf.nn import DropPath, LayerNorm, NoNorm, RMSNorm

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


WIRINGS = {
    "prenorm": PreNormConfig, "postnorm": PostNormConfig, "sandwich": SandwichConfig, "output_norm": OutputNormConfig,
    "normed_stream": NormedStreamConfig, "affine_residual": AffineResidualConfig,
}
BRANCHES = (("mixer", "mixer"), ("channel_mixer", "channel"))


def nudged(block):
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return block


def by_hand(name, block, x, skip=(1.0, 1.0), scale=(1.0, 1.0)):
    """The equations of the wirings, one line each."""
    for (branch, short), a, b in zip(BRANCHES, skip, scale, strict=True):
        part = getattr(block, branch)
        f = lambda z, part=part: part(z)[0]  # noqa: E731
        before, after = getattr(block, f"{short}_norm", None), getattr(block, f"{short}_post_norm", None)
        learned = getattr(block, f"{short}_scale", 1.0)
        if name == "affine_residual":
            stream, output = (getattr(block, f"{short}_affine")[side] for side in ("stream", "output"))
            y = (f(before(x)) + output.bias) * output.scale
            x = a * (x + stream.bias) * stream.scale + b * learned * y
        elif name == "prenorm":
            x = a * x + b * learned * f(before(x))
        elif name == "postnorm":
            x = after(a * x + b * learned * f(x))
        elif name == "sandwich":
            x = a * x + b * learned * after(f(before(x)))
        elif name == "output_norm":
            x = a * x + b * learned * after(f(x))
        else:
            x = a * before(x) + b * learned * f(before(x))
    return x


@pytest.mark.parametrize(
    ("options", "skip", "scale"),
    [
        ({}, (1, 1), (1, 1)),
        ({"residual_scale": 0.22}, (1, 1), (0.22, 0.22)),
        ({"residual_scale": (0.5, 2.0), "skip_scale": (1.5, 0.75)}, (1.5, 0.75), (0.5, 2.0)),
        ({"skip_scale": 0.0}, (0, 0), (1, 1)),
        ({"learned_scale": {"per": "channel", "start": 0.5}, "residual_scale": 3.0}, (1, 1), (3, 3)),
        ({"learned_scale": {"per": "branch"}}, (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("name", WIRINGS)
def test_each_wiring_is_its_equation(name, options, skip, scale):
    block = nudged(WIRINGS[name](**PARTS, **options).build(CTX))
    torch.testing.assert_close(block(X, {}).x, by_hand(name, block, X, skip, scale), rtol=0, atol=1e-13)
    sites = {n.rsplit(".", 1)[0] for n, _ in block.named_parameters() if "norm" in n}
    before = {"mixer_norm", "channel_norm"} if name in ("prenorm", "sandwich", "normed_stream", "affine_residual") else set()
    after = {"mixer_post_norm", "channel_post_norm"} if name in ("postnorm", "sandwich", "output_norm") else set()
    assert sites == before | after


@pytest.mark.parametrize("name", WIRINGS)
@pytest.mark.parametrize("branch", ["mixer", "channel_mixer"])
def test_a_block_of_one_branch(name, branch):
    block = nudged(WIRINGS[name](**{branch: PARTS[branch]}).build(CTX))
    whole = nudged(WIRINGS[name](**PARTS).build(CTX))
    assert set(block.state_dict()) < set(whole.state_dict())
    short = dict(BRANCHES)[branch]
    own = (f"{branch}.", *(f"{short}_{part}" for part in ("norm", "post_norm", "affine")))
    assert all(key.startswith(own) for key in block.state_dict())
    assert block(X, {}).x.shape == X.shape


def test_parallel_scales():
    options = {"residual_scale": (0.5, 2.0), "skip_scale": 1.5, "learned_scale": {"per": "channel", "start": 0.3}}
    block = nudged(ParallelConfig(**PARTS, **options).build(CTX))
    mixed = block.mixer_scale * block.mixer(block.mixer_norm(X))[0]
    changed = block.channel_scale * block.channel_mixer(block.channel_norm(X))[0]
    torch.testing.assert_close(block(X, {}).x, 1.5 * X + 0.5 * mixed + 2 * changed, rtol=0, atol=1e-13)


def test_norms_of_their_own():
    block = SandwichConfig(
        **PARTS, mixer_norm={"type": "layer_norm"}, channel_post_norm={"type": "rms_norm", "unit_offset": True},
        channel_norm={"type": "none"},
    ).build(CTX)
    assert isinstance(block.mixer_norm, LayerNorm)
    assert isinstance(block.channel_norm, NoNorm)
    assert isinstance(block.mixer_post_norm, RMSNorm)
    assert not block.mixer_post_norm.unit_offset
    assert block.channel_post_norm.unit_offset
    shared = ParallelConfig(**PARTS, shared_norm=True, mixer_norm={"type": "layer_norm"}).build(CTX)
    assert isinstance(shared.mixer_norm, LayerNorm)


def test_a_norm_that_cannot_be_built_names_its_place():
    bad = {"type": "group_norm", "n_groups": 3}
    ctx = BuildContext(d_model=8, where="model.blocks.a")
    with pytest.raises(ConfigError, match=r"model\.blocks\.a\.channel_norm: group_norm: a width of 8"):
        PreNormConfig(**PARTS, channel_norm=bad).build(ctx)
    with pytest.raises(ConfigError, match=r"model\.blocks\.a\.norm: group_norm"):
        PreNormConfig(**PARTS, norm=bad).build(ctx)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (PreNormConfig, {"mixer_post_norm": {"type": "none"}}, "mixer_post_norm: unknown option"),
        (PostNormConfig, {"mixer_norm": {"type": "none"}}, "mixer_norm: unknown option. Did you mean 'mixer_post_norm'"),
        (PreNormConfig, {"channel_mixer": None, "channel_norm": {"type": "none"}}, "the block has no channel_mixer"),
        (PreNormConfig, {"channel_mixer": None, "residual_scale": (1.0, 2.0)}, "residual_scale is a pair"),
        (PreNormConfig, {"residual_scale": 0.0}, "residual_scale: .*greater than 0"),
        (PreNormConfig, {"skip_scale": -1.0}, "skip_scale: .*greater than or equal to 0"),
        (PreNormConfig, {"residual_scale": (1.0, 0.0)}, "residual_scale"),
        (PreNormConfig, {"learned_scale": {"start": 1, "pr": "channel"}}, r"learned_scale\.pr: unknown"),
        (ParallelConfig, {"shared_norm": True, "channel_norm": {"type": "none"}}, "makes mixer_norm the only one"),
        (ParallelConfig, {"skip_scale": (1.0, 2.0)}, "skip_scale"),
    ],
)
def test_faults(config, options, message):
    with pytest.raises(ConfigError, match=message):
        config(**{name: value for name, value in {**PARTS, **options}.items() if value is not None})


@pytest.mark.parametrize("name", ["sandwich", "output_norm", "postnorm"])
def test_dropout_drops_what_is_added(name):
    """A dropped row keeps its stream untouched, although a norm stands after the branch."""
    norm = {"type": "layer_norm"}
    block = nudged(WIRINGS[name](**PARTS, norm=norm, drop_path=0.5).build(CTX)).train()
    x = X[:1].expand(200, 5, 8)
    y = block(x, {}).x
    untouched = block.channel_post_norm(block.mixer_post_norm(x)) if name == "postnorm" else x
    same = torch.isclose(y, untouched).flatten(1).all(1)
    assert 20 < int(same.sum()) < 80


@pytest.mark.parametrize("name", ["sandwich", "output_norm"])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_where_outputs_are_normed_the_norm_starts_scaled(name, unit_offset):
    config = WIRINGS[name](**PARTS, norm={"type": "rms_norm", "unit_offset": unit_offset})
    block, plain = config.build(CTX), PreNormConfig(**PARTS).build(CTX)
    init_parameters(block, 0, residual_scale=0.25)
    gain = (1 if unit_offset else 0) + block.mixer_post_norm.weight
    torch.testing.assert_close(gain, torch.full((8,), 0.25, dtype=torch.float64))
    torch.testing.assert_close(block.mixer.out_proj.weight, plain.mixer.out_proj.weight)
    roles = {n: s.role for n, s in param_specs(block).items()}
    assert (roles["mixer_post_norm.weight"], roles["mixer.out_proj.weight"]) == ("norm", "matrix")
    init_parameters(block, 0, residual_scale=0.0)
    assert torch.equal(block(X, {}).x, X)
    x = X.clone().requires_grad_()
    block(x, {}).x.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in block.parameters())
    assert block.mixer_post_norm.weight.grad.any()
    assert block.channel_post_norm.weight.grad.any()


@pytest.mark.parametrize("name", ["prenorm", "postnorm", "normed_stream"])
def test_elsewhere_the_last_matrix_starts_scaled(name):
    block, plain = WIRINGS[name](**PARTS).build(CTX), PreNormConfig(**PARTS).build(CTX)
    init_parameters(block, 0, residual_scale=0.25)
    torch.testing.assert_close(block.mixer.out_proj.weight, 0.25 * plain.mixer.out_proj.weight)
    torch.testing.assert_close(block.channel_mixer.down_proj.weight, 0.25 * plain.channel_mixer.down_proj.weight)


@pytest.mark.parametrize("name", [*WIRINGS, "parallel"])
def test_a_learned_scale_says_how_a_branch_starts(name):
    cls = {**WIRINGS, "parallel": ParallelConfig}[name]
    block = cls(**PARTS, learned_scale={"per": "branch", "start": 0.0}).build(CTX)
    init_parameters(block, 0, residual_scale=0.0)
    assert block.mixer_scale.tolist() == [0.0]
    assert block.mixer.out_proj.weight.any()
    block(X, {}).x.mul(X).sum().backward()
    assert block.mixer_scale.grad.any()  # a branch that is silent twice could never wake
    wide = cls(**PARTS, learned_scale={"start": 1e-5}).build(CTX)
    torch.testing.assert_close(wide.channel_scale, torch.full((8,), 1e-5, dtype=torch.float64))
