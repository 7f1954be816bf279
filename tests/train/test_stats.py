import math
import signal

import pytest
import torch

from hybridtf.core import BuildContext
from hybridtf.models import Stack
from hybridtf.train import Interrupted, read_log
from hybridtf.train.stats import LayerStats
from tests.train.runs import assert_equal_weights, build, recipe, run, task

SHARED = {
    "pattern": "m s m s",
    "blocks": {
        "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "dropout": 0.1},
        "s": {"mixer": {"type": "attention", "n_heads": 2}, "shared": True, "dropout": 0.1},
    },
}
WITHOUT_DROPOUT = {**SHARED, "blocks": {name: {**block, "dropout": 0.0} for name, block in SHARED["blocks"].items()}}
WEIGHTS = {"grad_norm", "grad_rms", "weight_rms", "update_ratio"}
ACTIVATIONS = {"activation_rms", "activation_max", "activation_zeros", "activation_kurtosis"}


def stats_of(out):
    return {line["step"]: line["layers"] for line in read_log(out / "log.jsonl") if line["event"] == "stats"}


@pytest.mark.parametrize("options", [
    {}, {"accumulation": 3, "checkpoint_layers": "all"}, {"model": SHARED, "precision": "bf16", "checkpoint_layers": [1]},
    {"optimizer": "muon", "ema_decay": 0.9},
])
def test_training_is_the_same_with_and_without(tmp_path, options):
    without = run(recipe(tmp_path, **options), tmp_path / "a")
    watched = run(recipe(tmp_path, stats_every=2, **options), tmp_path / "b")
    assert_equal_weights(without.model, watched.model)
    losses = [[x["loss"] for x in read_log(tmp_path / name / "log.jsonl") if x["event"] == "train"] for name in "ab"]
    assert losses[0] == losses[1]
    assert sorted(stats_of(tmp_path / "b")) == [2, 4, 6]
    assert stats_of(tmp_path / "a") == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())


def test_the_line_of_every_layer(tmp_path):
    run(recipe(tmp_path, stats_every=6, model=SHARED), tmp_path / "out")
    layers = stats_of(tmp_path / "out")[6]
    assert list(layers) == ["stem", "0.m", "1.s", "2.m", "3.s", "final_norm"]
    assert set(layers["0.m"]) == set(layers["1.s"]) == WEIGHTS | ACTIVATIONS
    assert set(layers["3.s"]) == ACTIVATIONS | {"weights_of"}
    assert layers["3.s"]["weights_of"] == "1.s"
    assert layers["3.s"]["activation_rms"] != layers["1.s"]["activation_rms"]
    assert set(layers["stem"]) == WEIGHTS
    assert all(math.isfinite(v) for layer in layers.values() for v in layer.values() if not isinstance(v, str))


def by_hand(model, batches):
    """Outputs of all layers at real tokens, caught by replacing the stack's forward."""
    caught = {}
    for stack in (m for m in model.modules() if isinstance(m, Stack)):
        def forward(x, edges, *, segments=None, stack=stack, **rest):
            seen, losses = dict(edges), {}
            for i, block in enumerate(stack.blocks()):
                out = block(x, seen, segments=segments)
                x, seen = out.x, out.edges
                caught.setdefault(i, []).append(x.detach()[segments.real].flatten() if segments is not None else x.flatten())
            return out._replace(losses=losses)

        stack.forward = forward
    total = sum(batch.n_tokens for batch in batches)
    for batch in batches:
        (model.loss(batch.inputs, batch.targets, batch.segments).total / total).backward()
    return {i: torch.cat(values).double() for i, values in caught.items()}


def test_the_numbers_are_those_of_a_step_by_hand(tmp_path):
    made = recipe(tmp_path, model=WITHOUT_DROPOUT, steps=1, accumulation=2, stats_every=1, clip_norm=1e-3, warmup=0)
    result = run(made, tmp_path / "out")
    layers = stats_of(tmp_path / "out")[1]
    plain = build(made)
    stream = task(made).train_batches(2, 32)
    found = by_hand(plain, [next(stream), next(stream)])
    for i, name in enumerate(["0.m", "1.s", "2.m", "3.s"]):
        x = found[i]
        centred = x - x.mean()
        expected = {
            "activation_rms": x.square().mean().sqrt(), "activation_max": x.abs().max(),
            "activation_zeros": (x == 0).double().mean(),
            "activation_kurtosis": centred.pow(4).mean() / centred.square().mean() ** 2,
        }
        for statistic, value in expected.items():
            assert layers[name][statistic] == pytest.approx(float(value), rel=1e-4), (name, statistic)
    for name, key in (("0.m", "0"), ("1.s", "shared_s"), ("2.m", "2")):
        old = dict(plain.stack.layers[key].named_parameters())
        new = dict(result.model.stack.layers[key].named_parameters())
        grad = torch.cat([p.grad.flatten() for p in old.values()]).double()
        before = torch.cat([p.detach().flatten() for p in old.values()]).double()
        change = torch.cat([(new[n] - old[n]).detach().flatten() for n in old]).double()
        expected = {
            "grad_norm": grad.norm(), "grad_rms": grad.square().mean().sqrt(), "weight_rms": before.square().mean().sqrt(),
            "update_ratio": change.norm() / before.norm(),
        }
        for statistic, value in expected.items():
            # The whole gradient, before clipping.
            assert layers[name][statistic] == pytest.approx(float(value), rel=1e-3), (name, statistic)


def test_moments_of_known_numbers():
    from hybridtf.train.stats import _moments

    for values in ([1.0, 2.0, 4.0, 0.0], [-3.0] * 5, [0.0, 0.0]):
        x = torch.tensor(values, dtype=torch.float64)
        sums = [len(values), *((x**k).sum().item() for k in range(1, 5)), (x == 0).sum().item()]
        found = _moments(sums, x.abs().max().item())
        assert found["activation_rms"] == pytest.approx(x.square().mean().sqrt().item())
        assert found["activation_zeros"] == values.count(0.0) / len(values)
        if len(set(values)) == 1:
            assert found["activation_kurtosis"] is None
        else:
            centred = x - x.mean()
            assert found["activation_kurtosis"] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2)
    assert _moments([0.0] * 6, 0.0) == {}


def test_a_resumed_run_writes_the_same_lines(tmp_path):
    made = recipe(tmp_path, stats_every=2, steps=8)
    run(made, tmp_path / "whole")

    def stop(report):
        if report.step == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run(made, tmp_path / "parts", on_step=stop)
    run(recipe(tmp_path, stats_every=4, steps=8), tmp_path / "parts", resume=True)
    whole, parts = stats_of(tmp_path / "whole"), stats_of(tmp_path / "parts")
    assert list(parts) == [2, 4, 8]
    assert all(parts[step] == whole[step] for step in parts)


@pytest.mark.slow
def test_a_compiled_model_is_watched_by_a_pass_of_its_own(tmp_path):
    # Compiled code draws its own dropout, so that only a model without is compared.
    options = {"steps": 3, "compile": True, "log_every": 1, "model": WITHOUT_DROPOUT}
    without = run(recipe(tmp_path, **options), tmp_path / "a")
    watched = run(recipe(tmp_path, stats_every=1, **options), tmp_path / "b")
    assert_equal_weights(without.model, watched.model)
    run(recipe(tmp_path, steps=3, stats_every=3, model=WITHOUT_DROPOUT), tmp_path / "eager")
    eager, compiled = stats_of(tmp_path / "eager")[3], stats_of(tmp_path / "b")[3]
    assert list(eager) == list(compiled)
    for name, layer in eager.items():
        for statistic, value in layer.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=1e-3)
            assert compiled[name][statistic] == same, (name, statistic)


def test_a_gradient_that_overflowed_is_null(tmp_path):
    model = build(recipe(tmp_path))
    stats = LayerStats(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, math.inf)
    stats.before_update()
    layers = stats.after_update()["layers"]
    assert layers["0.m"]["grad_norm"] is None
    assert layers["0.m"]["update_ratio"] == 0


def test_layers_of_a_shared_block_with_adapters(tmp_path):
    blocks = {**SHARED["blocks"], "s": {**SHARED["blocks"]["s"], "adapters": {"rank": 2, "on": ["mixer.q_proj"]}}}
    config = recipe(tmp_path, model={**WITHOUT_DROPOUT, "blocks": blocks}).model
    model = config.build(BuildContext(d_model=0, param_dtype=torch.float64)).eval()
    ids = torch.randint(0, config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(0))
    stats = LayerStats(model)
    with stats.watching(), torch.no_grad():
        model(ids)
    outputs, x, seen = {}, model.stem(ids)[0], {"embedding": model.stem(ids)[0], "token_ids": ids}
    for i, name in enumerate(stats.names):
        x = model.stack.visit(i)(x, seen).x
        outputs[name] = float(x.detach().square().sum())
    assert {name: pytest.approx(float(sums[2]), rel=1e-12) for name, sums in stats._sums.items()} == outputs
    own = {name: sum(p.numel() for p in params) for name, params in stats.weights.items()}
    assert "stack" not in own
    assert own["3.s"] == sum(p.numel() for p in model.stack.layers["3"].parameters())
    assert own["1.s"] == sum(p.numel() for key in ("shared_s", "1") for p in model.stack.layers[key].parameters())
