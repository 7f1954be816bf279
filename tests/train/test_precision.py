import json

import pytest
import torch

from hybridtf.core import ConfigError
from hybridtf.train.precision import check_precision, make_scaler
from hybridtf.train.step import accumulate, clip
from tests.train.runs import build, recipe, run, settings, task

CPU = torch.device("cpu")


def test_fp16_on_the_cpu_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp16' is not for the CPU: .*60 times slower"):
        run(recipe(tmp_path, precision="fp16"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bf16_and_fp32_are_taken_on_the_cpu():
    check_precision("bf16", CPU)
    check_precision("fp32", CPU)


def test_bf16_autocast_is_close_to_fp32_and_keeps_float32_parameters(tmp_path):
    made = recipe(tmp_path)
    batch = next(task(made).train_batches(4, 32))
    results = {}
    for precision in ("fp32", "bf16"):
        model = build(made).eval()
        sums = accumulate(model, [batch], settings(precision=precision), make_scaler(precision, CPU), CPU)
        results[precision] = sums.loss, torch.cat([p.grad.flatten() for p in model.parameters()])
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    (loss, gradient), (loss16, gradient16) = results["fp32"], results["bf16"]
    assert loss16 != loss
    assert loss16 == pytest.approx(loss, rel=5e-3)
    assert torch.nn.functional.cosine_similarity(gradient, gradient16, dim=0) > 0.995


def test_a_bf16_run_learns(tmp_path):
    losses = []
    run(recipe(tmp_path, steps=25, precision="bf16"), tmp_path / "out", on_step=lambda step: losses.append(step.loss))
    assert losses[-1] < losses[0] - 0.5


def test_the_scaled_gradient_is_the_gradient(tmp_path):
    made = recipe(tmp_path)
    batch = next(task(made).train_batches(2, 32))
    norms = []
    for scaler in (make_scaler("fp32", CPU), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = build(made).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, [batch], settings(), scaler, CPU)
        scaler.unscale_(optimizer)
        norms.append(clip(model, 0.0))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_an_overflow_under_scaling_leaves_the_step_out_and_lowers_the_scale(tmp_path, monkeypatch):
    import hybridtf.train.run as run_module

    # 2^127 overflows float32 in the backward pass; some halvings later it does not.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.5, growth_interval=1000)
    monkeypatch.setattr(run_module, "make_scaler", lambda precision, device: scaler)
    seen = []

    def look(step):
        seen.append((step.norm, step.model.stem.embedding.weight.detach().clone()))

    run(recipe(tmp_path, steps=12), tmp_path / "out", on_step=look)
    finite = [bool(torch.isfinite(torch.tensor(norm))) for norm, _ in seen]
    assert not finite[0]
    assert finite[-1]
    first = finite.index(True)
    assert all(torch.equal(weight, seen[0][1]) for _, weight in seen[:first])
    assert not torch.equal(seen[first][1], seen[0][1])
    assert scaler.get_scale() == 2.0 ** (127 - first)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_run_on_a_gpu_learns_and_resumes(tmp_path, precision):
    made = recipe(tmp_path, steps=30, precision=precision, save_every=10, keep_checkpoints=9, schedule="constant")
    losses = []
    whole = run(made, tmp_path / "whole", device="cuda", on_step=lambda step: losses.append(step.loss))
    assert losses[-1] < losses[0] - 0.5
    run(recipe(tmp_path, steps=20, precision=precision, schedule="constant"), tmp_path / "parts", device="cuda")
    again = run(made, tmp_path / "parts", device="cuda", resume=True)
    data = [json.loads((found.checkpoint / "trainer.json").read_text()) for found in (whole, again)]
    assert data[0]["scaler"] == data[1]["scaler"]
    assert data[0]["stream"] == data[1]["stream"]
    # Kernels of a GPU may add in any order, so that equality is not to the bit.
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.02)
