import math

import pytest
import torch

from hybridtf.core import CheckpointError, param_specs
from hybridtf.train import build_optimizer, parameter_groups
from hybridtf.train.optimizer import load_optimizer_tensors, optimizer_tensors, set_lr
from tests.train.runs import build, recipe, settings


@pytest.fixture
def model(tmp_path):
    return build(recipe(tmp_path))


def test_groups_follow_roles(model):
    groups = {group["role"]: group for group in parameter_groups(model, settings(weight_decay=0.3))}
    assert set(groups) == {"matrix", "embedding", "norm", "bias", "state", "conv"}
    decays = {role: group["weight_decay"] for role, group in groups.items()}
    assert decays == {"matrix": 0.3, "embedding": 0.3, "conv": 0.3, "norm": 0.0, "bias": 0.0, "state": 0.0}
    for role, group in groups.items():
        for name in group["names"]:
            assert param_specs(model)[name].role == role
    assert "stack.layers.0.mixer.A_log" in groups["state"]["names"]
    assert "final_norm.weight" in groups["norm"]["names"]
    assert groups["embedding"]["names"] == ["stem.embedding.weight"]


def test_every_parameter_is_in_one_group(model):
    grouped = [id(p) for group in parameter_groups(model, settings()) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_frozen_parameters_are_left_out(model):
    model.stem.embedding.weight.requires_grad_(False)
    assert "embedding" not in {group["role"] for group in parameter_groups(model, settings())}


def test_role_options(model):
    config = settings(roles={"embedding": {"weight_decay": 0.0, "lr_scale": 0.5}, "norm": {"weight_decay": 0.7}})
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, 0.1)
    groups = {group["role"]: group for group in optimizer.param_groups}
    assert (groups["embedding"]["weight_decay"], groups["embedding"]["lr"]) == (0.0, 0.05)
    assert (groups["norm"]["weight_decay"], groups["norm"]["lr"]) == (0.7, 0.1)
    assert groups["matrix"]["lr"] == 0.1


@pytest.mark.parametrize("form", ["auto", "loop", "foreach", "fused"])
def test_adamw_is_its_formula(tmp_path, form):
    model = build(recipe(tmp_path), torch.float64)
    config = settings(optimizer_form=form, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-5)
    optimizer = build_optimizer(model, config)
    decay = {name: g["weight_decay"] for g in optimizer.param_groups for name in g["names"]}
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in range(1, 4):
        lr = 0.01 * step
        set_lr(optimizer, lr)
        for name, p in model.named_parameters():
            g = p.grad = torch.randn(p.shape, dtype=p.dtype)
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            root = (second[name] / (1 - 0.95**step)).sqrt() + 1e-5
            expected[name] = expected[name] * (1 - lr * decay[name]) - lr * (first[name] / (1 - 0.8**step)) / root
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-10, atol=1e-12)


def test_moments_survive_a_round_trip(tmp_path):
    made = recipe(tmp_path)
    left, right = build(made), build(made)
    optimizers = [build_optimizer(m, settings()) for m in (left, right)]
    gradients = [[torch.randn(p.shape) for p in left.parameters()] for _ in range(2)]
    for p, g in zip(left.parameters(), gradients[0], strict=True):
        p.grad = g.clone()
    optimizers[0].step()
    right.load_state_dict(left.state_dict())
    copied = {name: value.clone() for name, value in optimizer_tensors(optimizers[0]).items()}
    load_optimizer_tensors(optimizers[1], copied, where="x")
    for m, optimizer in zip((left, right), optimizers, strict=True):
        for p, g in zip(m.parameters(), gradients[1], strict=True):
            p.grad = g.clone()
        optimizer.step()
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)
    assert math.isclose(float(next(iter(optimizers[1].state.values()))["step"]), 2.0)


def test_moments_that_do_not_fit_are_named(model):
    optimizer = build_optimizer(model, settings())
    with pytest.raises(CheckpointError, match=r"x: holds optimizer\.exp_avg\.nothing"):
        load_optimizer_tensors(optimizer, {"optimizer.exp_avg.nothing": torch.zeros(1)}, where="x")
    with pytest.raises(CheckpointError, match=r"optimizer's tensors of final_norm\.weight do not fit"):
        load_optimizer_tensors(optimizer, {"optimizer.exp_avg.final_norm.weight": torch.zeros(8)}, where="x")
