"""Lengths that no chunk divides, odd widths, inputs that are not contiguous, prefill cut anywhere."""

from __future__ import annotations

import random

import pytest
import torch
from annotated_types import Gt

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.mixers import AttentionConfig, Mamba2Config
from hybridtf.testing.compare import close_states, gradients
from tests.field.layers import F32, F64, chunked, config, every, mixer, pieces, same, solo


@chunked
@pytest.mark.parametrize("t", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_any_length_beside_chunks_of_16(name, t):
    """Forward, backward and final state against the recurrence token by token; the declared length of 64 is no limit."""
    layer, judge = mixer(name, chunk_size=16), mixer(name, chunk_size=16, kernel="reference")
    judge.load_state_dict(layer.state_dict())
    x, weight = torch.randn(2, t, 16, dtype=F64, requires_grad=True), torch.randn(2, t, 16, dtype=F64)
    results = []
    for one in (layer, judge):
        y, state = solo(one, x)
        results.append((y, state, gradients((y * weight).sum(), [x, *one.parameters()])))
    (y, state, grads), (want, want_state, want_grads) = results
    same(y, want)
    close_states(state, want_state, tol=1e-10, what="final state")
    for a, b in zip(grads, want_grads, strict=True):
        same(a, b, 1e-9)


@every
@pytest.mark.parametrize("d_model", [12, 20, 36, 52])
@torch.no_grad()
def test_odd_model_widths_and_inputs_that_are_not_contiguous(name, d_model):
    layer = mixer(name, d_model=d_model)
    x = torch.randn(2, d_model, 9, dtype=F64).transpose(1, 2)
    assert not x.is_contiguous()
    y, state = solo(layer, x)
    want, want_state = solo(layer, x.contiguous())
    same(y, want, 1e-12)
    close_states(state, want_state, tol=1e-12, what="final state")


@pytest.mark.parametrize("d_model", [12, 20, 36, 52])
@pytest.mark.parametrize("head_dim", [5, 6, 7, 10])
def test_odd_head_widths_with_and_without_rotary(d_model, head_dim):
    ctx = BuildContext(d_model=d_model, param_dtype=F64)
    x = torch.randn(2, d_model, 9, dtype=F64).transpose(1, 2)
    for made in (
        AttentionConfig(n_heads=3, head_dim=head_dim, position={"type": "none"}),
        Mamba2Config(n_heads=3, head_dim=head_dim, d_state=3),
    ):
        layer = made.build(ctx)
        same(layer(x)[0], layer(x.contiguous())[0], 1e-12)
        assert layer(x)[0].shape == (2, 9, d_model)
    if head_dim % 2:
        with pytest.raises(ConfigError, match=f"head_dim {head_dim} .*must be even"):
            AttentionConfig(n_heads=3, head_dim=head_dim).build(ctx)
    else:
        assert AttentionConfig(n_heads=3, head_dim=head_dim).build(ctx)(x)[0].shape == (2, 9, d_model)


@pytest.mark.parametrize("d_model", [12, 20, 36, 52])
@pytest.mark.parametrize("n_heads", [2, 3, 4])
def test_heads_that_do_not_divide_are_refused_when_built_naming_the_field(d_model, n_heads):
    ctx = BuildContext(d_model=d_model)
    made = AttentionConfig(n_heads=n_heads, position={"type": "none"})
    if d_model % n_heads:
        with pytest.raises(ConfigError, match=f"d_model = {d_model} is not divisible by n_heads = {n_heads}"):
            made.build(ctx)
    else:
        assert made.build(ctx)(torch.randn(1, 5, d_model))[0].shape == (1, 5, d_model)


@pytest.mark.parametrize("expand", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("head_dim", [5, 6, 7, 10])
def test_widths_from_factors_are_not_cut_to_whole_heads(expand, head_dim):
    for d_model in (20, 28):
        made = Mamba2Config(expand=expand, head_dim=head_dim, d_state=3)
        inner = round(expand * d_model)
        if inner % head_dim:
            with pytest.raises(ConfigError, match=rf"expand \* d_model = {inner} is not divisible by head_dim = {head_dim}"):
                made.build(BuildContext(d_model=d_model))
            continue
        layer = made.build(BuildContext(d_model=d_model))
        assert layer.n_heads * head_dim == inner
        assert layer(torch.randn(1, 5, d_model))[0].shape == (1, 5, d_model)


@every
def test_a_width_of_nothing_is_refused_by_its_name(name):
    fields = {
        key: limit.gt for key, info in type(config(name)).model_fields.items() if key.startswith(("n_", "d_"))
        for limit in info.metadata if isinstance(limit, Gt)
    }
    if not fields:
        pytest.skip("has no width of its own")
    for key, least in fields.items():
        with pytest.raises(RecipeError, match=rf"{key}: input should be greater than {least}"):
            config(name, **{key: 0})


@every
@torch.no_grad()
def test_prefill_cut_anywhere_differs_by_rounding_alone(name):
    """96 tokens in 20 random ways; tolerances: 1e-10 in float64, 1e-4 of the largest output in float32."""
    draw = random.Random(0)
    chunks = "chunk_size" in type(config(name)).model_fields
    for dtype, tol in ((F64, 1e-10), (F32, 1e-4)):
        x = torch.randn(1, 96, 16, dtype=dtype)
        want = mixer(name, "cut", dtype=dtype)(x)[0]
        for i in range(20):
            layer = mixer(name, dtype=dtype, **({"chunk_size": (8, 16, 32)[i % 3]} if chunks else {}))
            cuts = sorted(draw.sample(range(1, 96), draw.randint(1, 6)))
            split = [b - a for a, b in zip([0, *cuts], [*cuts, 96], strict=True)]
            got, _ = pieces(layer, x, split, layer.init_state(1))
            assert float((got - want).abs().max()) < tol * float(want.abs().max())
            assert torch.equal(got, pieces(layer, x, split, layer.init_state(1))[0])
