"""Start values: from (seed, name), in any dtype, with the right statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hybridtf.core import NO_DECAY, ConfigError, ParamSpec, init, init_parameters, param_specs


def draw(fill: init.Init, *shape: int) -> torch.Tensor:
    value = torch.zeros(shape)
    fill(value, torch.Generator().manual_seed(0))
    return value


def test_fills() -> None:
    assert draw(init.normal(0.3), 10000).std().item() == pytest.approx(0.3, rel=0.05)
    spread = draw(init.uniform(-1, 3), 10000)
    assert spread.min() >= -1
    assert spread.max() <= 3
    assert spread.mean().item() == pytest.approx(1, abs=0.1)
    assert draw(init.constant(2.5), 3).tolist() == [2.5] * 3
    rates = draw(init.log_uniform(1, 16), 10000).exp()
    assert rates.min() >= 0.999
    assert rates.max() <= 16.001
    assert rates.mean().item() == pytest.approx(8.5, rel=0.05)


def test_time_steps_are_log_even_and_floored() -> None:
    dt = nn.functional.softplus(draw(init.softplus_inverse_log_uniform(1e-3, 0.1, 1e-2), 10000).double())
    assert dt.min().item() == pytest.approx(1e-2, rel=1e-3)
    assert dt.max().item() <= 0.1 * 1.001
    # Half of the range in logarithms lies below the floor.
    assert (dt < 1.001e-2).double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_fan_in_keeps_unit_size() -> None:
    weight = torch.empty(300, 500)
    assert draw(init.fan_in(weight), 300, 500).std().item() == pytest.approx(500**-0.5, rel=0.02)
    init.fan_in(torch.empty(0, 5))
    init.fan_in(torch.empty(5, 0))


class Scaled(nn.Module):
    """A Linear that ends a residual branch, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.empty(8))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "gain": ParamSpec("norm", init.constant(1.0)),
            "out_proj.weight": ParamSpec("matrix", init.normal(1.0), residual=True),
        }


class Outer(nn.Module):
    def __init__(self, *, speaks: bool = False) -> None:
        super().__init__()
        self.speaks = speaks
        self.a, self.b = Scaled(), Scaled()
        self.embedding = nn.Embedding(5, 16)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"a.gain": ParamSpec("state", init.constant(3.0))} if self.speaks else {}


def test_roles() -> None:
    specs = param_specs(Outer(speaks=True))
    assert {name: spec.role for name, spec in specs.items()} == {
        "a.gain": "state", "a.out_proj.weight": "matrix", "a.out_proj.bias": "bias", "b.gain": "norm",
        "b.out_proj.weight": "matrix", "b.out_proj.bias": "bias", "embedding.weight": "embedding",
    }
    assert specs["a.out_proj.weight"].residual
    assert {"norm", "bias", "state"} == NO_DECAY


def test_an_outer_word_beats_an_inner_one() -> None:
    model = Outer(speaks=True)
    init_parameters(model, 0)
    assert model.a.gain.tolist() == [3.0] * 8
    assert model.b.gain.tolist() == [1.0] * 8


def test_values_depend_on_seed_and_name_alone() -> None:
    models = [Outer() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(seed + 99)
        init_parameters(model, seed)
    one, two, other = models
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert not torch.equal(one.a.out_proj.weight, one.b.out_proj.weight)
    assert one.a.out_proj.bias.tolist() == [0.0] * 8
    assert one.embedding.weight.std().item() == pytest.approx(16**-0.5, rel=0.2)
    # The same name in a smaller model starts with the same values.
    small = nn.ModuleDict({"a": Scaled()})
    init_parameters(small, 0)
    assert torch.equal(small["a"].out_proj.weight, one.a.out_proj.weight)


def test_low_precision_is_a_cast_of_high() -> None:
    wide, low = Outer().double(), Outer().bfloat16()
    init_parameters(wide, 5)
    init_parameters(low, 5)
    for a, b in zip(wide.parameters(), low.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)


@pytest.mark.parametrize("scale", [0.0, 0.25, 1.0])
def test_residual_matrices_are_scaled(scale: float) -> None:
    plain, scaled = Outer(), Outer()
    init_parameters(plain, 0)
    init_parameters(scaled, 0, residual_scale=scale)
    assert torch.equal(scaled.a.out_proj.weight, plain.a.out_proj.weight * scale)
    assert torch.equal(scaled.embedding.weight, plain.embedding.weight)


def test_meta_parameters_are_left_alone() -> None:
    with torch.device("meta"):
        model = Outer()
    init_parameters(model, 0)
    assert model.a.gain.is_meta
    model.to_empty(device="cpu")
    init_parameters(model, 0)
    assert model.a.gain.tolist() == [1.0] * 8


def test_gradients_do_not_see_the_fill() -> None:
    model = Scaled()
    init_parameters(model, 0)
    assert model.gain.requires_grad
    assert model.gain.grad_fn is None


def test_a_parameter_without_a_role_is_refused() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mystery = nn.Parameter(torch.zeros(2))

    with pytest.raises(ConfigError, match=r"parameter 'part.mystery' has no role.*param_specs"):
        param_specs(nn.ModuleDict({"part": Silent()}))


def test_softplus_inverse_is_exact_for_small_steps() -> None:
    fill = init.softplus_inverse_log_uniform(1e-4, 1e-4, 0.0)
    assert math.log1p(math.exp(draw(fill, 1).double().item())) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("width", [1, 5])
def test_orthogonal_blocks(blocks: int, width: int) -> None:
    value = torch.zeros(blocks * width, width)
    init.orthogonal(blocks)(value, torch.Generator().manual_seed(3))
    parts = value.chunk(blocks)
    for part in parts:
        torch.testing.assert_close(part @ part.T, torch.eye(width), rtol=0, atol=1e-6)
    if width > 1:
        assert all(not torch.equal(parts[0], other) for other in parts[1:])
    before = torch.random.get_rng_state()
    init.orthogonal(blocks)(value, torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.random.get_rng_state())
