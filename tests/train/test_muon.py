import copy
import json

import pytest
import torch
from torch import nn

from hybridtf.core import CheckpointError, ConfigError, ParamSpec, init
from hybridtf.train import build_optimizer, parameter_groups
from hybridtf.train.muon import matrix_splits, orthogonalise, update_scale
from hybridtf.train.optimizer import load_optimizer_tensors, optimizer_tensors, set_lr
from tests.train.runs import build, recipe, run, settings

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def naive_direction(matrix):
    """Newton-Schulz as odd polynomials of the singular values, in float64: no matrix is ever multiplied out."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def naive_muon(param, grads, *, lr, momentum=0.95, weight_decay=0.1, nesterov=True, scale=1.0):
    value, buffer = param.double(), torch.zeros_like(param, dtype=torch.float64)
    for grad in grads:
        buffer = momentum * buffer + (1 - momentum) * grad.double()
        update = momentum * buffer + (1 - momentum) * grad.double() if nesterov else buffer
        value = value * (1 - lr * weight_decay) - lr * scale * naive_direction(update)
    return value


def steps(model, optimizer, grads):
    for step in grads:
        for param, grad in zip(model.parameters(), step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


class Fused(nn.Module):
    """One projection of three matrices, and the same experts as a stack (e in out)."""

    def __init__(self, dtype=torch.float64, stacked=False):
        super().__init__()
        self.splits = {"in_proj": {"q": 6, "k": 3, "gate": 1}}
        if stacked:
            self.in_proj = nn.Parameter(torch.randn(2, 5, 10, dtype=dtype))
        else:
            self.in_proj = nn.Linear(5, 10, bias=False, dtype=dtype)

    def param_specs(self):
        stacked = isinstance(self.in_proj, nn.Parameter)
        return {"in_proj" if stacked else "in_proj.weight": ParamSpec("matrix", init.normal(1.0))}


class Apart(nn.Module):
    def __init__(self, matrices):
        super().__init__()
        for name, value in matrices.items():
            linear = nn.Linear(value.shape[1], value.shape[0], bias=False, dtype=value.dtype)
            linear.weight = nn.Parameter(value.clone())
            setattr(self, name, linear)


@pytest.mark.parametrize("shape", [(7, 7), (5, 11), (11, 5), (1, 6), (6, 1), (1, 1), (3, 4, 9), (3, 9, 4)])
def test_orthogonalising_equals_the_polynomial_of_the_singular_values(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    found = orthogonalise(x, steps=5, coefficients=COEFFICIENTS, dtype=torch.float64)
    expected = naive_direction(x) if x.ndim == 2 else torch.stack([naive_direction(slice) for slice in x])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_singular_values_come_near_one_and_zeros_stay():
    torch.manual_seed(0)
    for shape in ((64, 64), (32, 96)):
        found = orthogonalise(torch.randn(shape), steps=5, coefficients=COEFFICIENTS, dtype=torch.float32)
        values = torch.linalg.svdvals(found)
        assert values.max() < 1.3
        assert values.median() > 0.65
    zero = orthogonalise(torch.zeros(4, 3), steps=5, coefficients=COEFFICIENTS, dtype=torch.float32)
    assert torch.equal(zero, torch.zeros(4, 3))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_a_matrix_equals_torchs_muon_bit_for_bit(nesterov, scale):
    torch.manual_seed(0)
    for n_out, n_in in ((8, 8), (5, 12), (12, 5)):
        ours = nn.Linear(n_in, n_out, bias=False)
        theirs = copy.deepcopy(ours)
        config = settings(
            optimizer="muon", muon={"nesterov": nesterov, "scale": scale, "precision": "bf16"}, lr=0.1, weight_decay=0.3
        )
        torch_muon = torch.optim.Muon(
            theirs.parameters(), lr=0.1, weight_decay=0.3, momentum=0.95, nesterov=nesterov, adjust_lr_fn=scale
        )
        grads = [[torch.randn(n_out, n_in)] for _ in range(4)]
        steps(ours, build_optimizer(ours, config), grads)
        steps(theirs, torch_muon, grads)
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize(("n_out", "n_in", "scale", "factor"), [
    (9, 4, "original", 1.5), (4, 9, "original", 1.0), (9, 4, "match_rms_adamw", 0.6), (4, 9, "match_rms_adamw", 0.6),
])
def test_a_float64_matrix_equals_a_naive_muon(n_out, n_in, scale, factor):
    torch.manual_seed(0)
    assert update_scale(scale, n_out, n_in) == pytest.approx(factor)
    model = nn.Linear(n_in, n_out, bias=False, dtype=torch.float64)
    start = model.weight.detach().clone()
    grads = [torch.randn(n_out, n_in, dtype=torch.float64) for _ in range(5)]
    optimizer = build_optimizer(model, settings(optimizer="muon", muon={"scale": scale}, lr=0.05))
    steps(model, optimizer, [[g] for g in grads])
    torch.testing.assert_close(model.weight, naive_muon(start, grads, lr=0.05, scale=factor), rtol=1e-9, atol=1e-9)


def test_a_fused_projection_is_updated_as_its_matrices_apart():
    torch.manual_seed(0)
    fused = Fused()
    widths = list(fused.splits["in_proj"].values())
    apart = Apart(dict(zip(fused.splits["in_proj"], fused.in_proj.weight.detach().split(widths), strict=True)))
    grads = [torch.randn(10, 5, dtype=torch.float64) for _ in range(3)]
    config = settings(optimizer="muon", lr=0.1)
    steps(fused, build_optimizer(fused, config), [[g] for g in grads])
    steps(apart, build_optimizer(apart, config), [list(g.split(widths)) for g in grads])
    torch.testing.assert_close(fused.in_proj.weight, torch.cat(list(apart.parameters())), rtol=1e-12, atol=1e-12)
    # It is another thing than one matrix.
    torch.manual_seed(0)
    whole = Fused()
    whole.splits = {}
    steps(whole, build_optimizer(whole, config), [[g] for g in grads])
    assert (whole.in_proj.weight - fused.in_proj.weight).abs().max() > 1e-3


def test_stacked_experts_are_updated_one_by_one_and_by_their_splits():
    torch.manual_seed(0)
    stack = Fused(stacked=True)
    widths = list(stack.splits["in_proj"].values())
    pieces = {
        f"{e}_{role}": piece.T.contiguous()
        for e, expert in enumerate(stack.in_proj.detach())
        for role, piece in zip(stack.splits["in_proj"], expert.split(widths, 1), strict=True)
    }
    apart = Apart(pieces)
    grads = [torch.randn(2, 5, 10, dtype=torch.float64) for _ in range(3)]
    # With the scale that depends on which side is which: experts are stacked as (e in out).
    config = settings(optimizer="muon", lr=0.1, muon={"scale": "original"})
    steps(stack, build_optimizer(stack, config), [[g] for g in grads])
    of_pieces = [[p.T for expert in g for p in expert.split(widths, 1)] for g in grads]
    steps(apart, build_optimizer(apart, config), of_pieces)
    found = [p.T for expert in stack.in_proj for p in expert.split(widths, 1)]
    for a, b in zip(found, apart.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_splits_that_do_not_add_up_are_refused():
    model = Fused()
    model.splits = {"in_proj": {"q": 6, "k": 3}}
    with pytest.raises(ConfigError, match=r"splits of in_proj are .* 9 together; the matrix has 10 outputs"):
        matrix_splits(model)
    # A projection that is not there is another module's affair.
    model.splits = {"nothing": {"q": 6}}
    assert matrix_splits(model) == {}


# -- models ------------------------------------------------------------------------------------------------------------


def test_matrices_go_to_muon_and_everything_else_to_adamw(tmp_path):
    model = build(recipe(tmp_path))
    groups = parameter_groups(model, settings(optimizer="muon", lr=0.1, muon={"lr": 0.02}))
    methods = {(group["role"], group["method"]) for group in groups}
    assert methods == {
        ("matrix", "muon"), ("embedding", "adamw"), ("norm", "adamw"), ("bias", "adamw"), ("state", "adamw"), ("conv", "adamw"),
    }
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    muon = next(group for group in groups if group["method"] == "muon")
    assert muon["lr_scale"] == pytest.approx(0.2)
    widths = dict(zip(muon["names"], muon["splits"], strict=True))
    mixer = model.stack.layers["0"].mixer
    assert widths["stack.layers.0.mixer.in_proj.weight"] == tuple(mixer.splits["in_proj"].values())
    assert widths["stack.layers.0.mixer.out_proj.weight"] == ()


def test_the_rest_moves_as_under_adamw_alone(tmp_path):
    models = [build(recipe(tmp_path), torch.float64) for _ in range(2)]
    torch.manual_seed(0)
    grads = [[torch.randn_like(p) for p in models[0].parameters()] for _ in range(3)]
    options = {"lr": 0.01, "roles": {"norm": {"lr_scale": 0.5, "weight_decay": 0.2}}}
    for model, optimizer in zip(models, ("adamw", "muon"), strict=True):
        made = build_optimizer(model, settings(optimizer=optimizer, **options))
        set_lr(made, 0.01)
        steps(model, made, grads)
    muon = parameter_groups(models[1], settings(optimizer="muon"))
    matrices = {name for group in muon if group["method"] == "muon" for name in group["names"]}
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b) == (name not in matrices), name


def test_moments_are_saved_and_taken_over(tmp_path):
    left, right = build(recipe(tmp_path)), build(recipe(tmp_path))
    config = settings(optimizer="muon")
    optimizers = [build_optimizer(model, config) for model in (left, right)]
    torch.manual_seed(0)
    grads = [[torch.randn_like(p) for p in left.parameters()] for _ in range(4)]
    steps(left, optimizers[0], grads[:2])
    right.load_state_dict(left.state_dict())
    kept = {name: value.clone() for name, value in optimizer_tensors(optimizers[0]).items()}
    assert "optimizer.momentum_buffer.stack.layers.0.mixer.in_proj.weight" in kept
    assert "optimizer.exp_avg.stack.layers.0.mixer.in_proj.weight" not in kept
    assert "optimizer.exp_avg.stem.embedding.weight" in kept
    load_optimizer_tensors(optimizers[1], kept, where="x")
    for model, optimizer in zip((left, right), optimizers, strict=True):
        steps(model, optimizer, grads[2:])
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CheckpointError, match="which is no parameter"):
        load_optimizer_tensors(
            optimizers[1], {"optimizer.exp_avg.stack.layers.0.mixer.in_proj.weight": torch.zeros(1)}, where="x"
        )


def test_matrices_alone(tmp_path):
    model = nn.Linear(3, 4, bias=False)
    optimizer = build_optimizer(model, settings(optimizer="muon"))
    steps(model, optimizer, [[torch.ones(4, 3)]])
    assert set(optimizer.state[model.weight]) == {"momentum_buffer"}
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_step_that_overflows_is_skipped_by_both_parts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def param_specs(self):
            return {}

    model = Model()
    optimizer = build_optimizer(model, settings(optimizer="muon"))
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for name in ("weight", "bias"):
        optimizer.zero_grad()
        scaler.scale(model.linear(torch.ones(1, 3)).sum()).backward()
        getattr(model.linear, name).grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.zero_grad()
    scaler.scale(model.linear(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    assert not any(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_run_learns_and_says_what_trained_each_parameter(tmp_path):
    made = recipe(tmp_path, model={"d_model": 24}, steps=60, batch_size=4, lr=2e-2, optimizer="muon", eval_tokens="all")
    result = run(made, tmp_path / "out")
    assert result.evaluation.bits_per_byte < 0.8
    found = json.loads((tmp_path / "out" / "parameters.json").read_text())
    assert found.keys() == dict(result.model.named_parameters()).keys()
    fused = found["stack.layers.0.mixer.in_proj.weight"]
    assert (fused["role"], fused["optimizer"], len(fused["splits"])) == ("matrix", "muon", 5)
    assert found["stack.layers.0.mixer.A_log"]["optimizer"] == "adamw"
    assert (found["stem.embedding.weight"]["weight_decay"], found["final_norm.weight"]["weight_decay"]) == (0.1, 0.0)
    assert "momentum = 0.95" in (tmp_path / "out" / "recipe.toml").read_text()
