import signal

import pytest
import torch
from safetensors.torch import load_file

from hybridtf.core import CheckpointError
from hybridtf.train import Interrupted, RunFolder, evaluate, load_model, load_run, read_log
from hybridtf.train.average import Average, decay_at
from hybridtf.train.checkpoint import read_trainer_state
from tests.train.runs import assert_equal_weights, build, recipe, run, task


def test_the_average_equals_its_closed_form(tmp_path):
    weights = []
    made = recipe(tmp_path, steps=7, ema_decay=0.3, ema_every=2, save_every=7)

    def keep(report):
        weights.append({name: p.detach().double() for name, p in report.model.named_parameters()})

    result = run(made, tmp_path / "out", on_step=keep)
    found = load_file(result.checkpoint / "ema.safetensors")
    start = {name: p.detach().double() for name, p in build(made).named_parameters()}
    decays = [min(0.3, (1 + t) / (10 + t)) for t in range(3)]
    assert decays == [0.1, 2 / 11, 0.25]
    # Updates after steps 2, 4 and 6: each weight's share is its own times all later decays.
    shares = [(1 - decays[t]) * torch.tensor(decays[t + 1 :]).prod().item() for t in range(3)]
    for name, value in found.items():
        assert value.dtype == torch.float32
        expected = torch.tensor(decays).prod().item() * start[name]
        expected = expected + sum(share * weights[2 * t + 1][name] for t, share in enumerate(shares))
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    assert found.keys() == start.keys()


def test_the_decay_warms_up_to_what_was_asked():
    assert [round(decay_at(0.99, t), 4) for t in (0, 1, 89)] == [0.1, 0.1818, 0.9091]
    assert decay_at(0.99, 10_000) == 0.99


def test_a_bfloat16_model_has_an_average_in_float32(tmp_path):
    model = build(recipe(tmp_path), torch.bfloat16)
    average = Average(model, 0.999)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for step in range(1, 20):
        average.update(model, step)
    assert {value.dtype for value in average.tensors.values()} == {torch.float32}
    name = "stem.embedding.weight"
    assert (average.tensors[name] - average.tensors[name].bfloat16().float()).abs().max() > 0
    assert {t.dtype for t in Average(build(recipe(tmp_path), torch.float64), 0.9).tensors.values()} == {torch.float64}


def test_training_is_the_same_with_and_without(tmp_path):
    options = {"eval_every": 2, "eval_tokens": 60}
    without = run(recipe(tmp_path, **options), tmp_path / "a")
    averaged = run(recipe(tmp_path, ema_decay=0.9, eval_ema=True, **options), tmp_path / "b")
    assert_equal_weights(without.model, averaged.model)
    assert averaged.metrics == without.metrics
    assert not (without.checkpoint / "ema.safetensors").exists()


def test_evaluations_score_both_and_loading_takes_either(tmp_path, capsys):
    made = recipe(tmp_path, ema_decay=0.9, eval_ema=True, eval_tokens=60)
    result = run(made, tmp_path / "out", progress="lines")
    plain, averaged = load_model(tmp_path / "out"), load_model(tmp_path / "out", weights="ema")
    assert not torch.equal(plain.stem.embedding.weight, averaged.stem.embedding.weight)
    options = {"seq_len": 32, "batch_size": 2, "max_tokens": 60}
    assert evaluate(plain, task(made), **options).metrics == result.metrics
    assert evaluate(averaged, task(made), **options).metrics == result.ema_metrics
    line = list(read_log(tmp_path / "out" / "log.jsonl"))[-1]
    assert line["ema"]["bits_per_byte"] == result.ema_metrics["bits_per_byte"] != line["bits_per_byte"]
    assert f"average: bits_per_byte {result.ema_metrics['bits_per_byte']:.4f}" in capsys.readouterr().err.replace("\n", "")
    again = run(None, tmp_path / "out", resume=True)
    assert (again.evaluation, again.ema_metrics) == (None, result.ema_metrics)
    assert_equal_weights(load_run(tmp_path / "out", dtype=torch.float64, weights="ema").model, averaged.double())


def test_stopped_and_resumed_equals_straight_through(tmp_path):
    options = {"optimizer": "muon", "accumulation": 2, "ema_decay": 0.8, "ema_every": 2, "log_every": 1, "save_every": 3}
    made = recipe(tmp_path, steps=8, **options)
    run(made, tmp_path / "whole")

    def stop(report):
        if report.step == 5:
            signal.raise_signal(signal.SIGINT)

    class Killed(Exception):
        pass

    def kill(report):
        if report.step == 7:
            raise Killed

    with pytest.raises(Interrupted):
        run(made, tmp_path / "parts", on_step=stop)
    with pytest.raises(Killed):
        run(None, tmp_path / "parts", resume=True, on_step=kill)
    run(None, tmp_path / "parts", resume=True)
    folders = [RunFolder(tmp_path / name).checkpoint() for name in ("whole", "parts")]
    for file in ("weights.safetensors", "ema.safetensors"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    states = [read_trainer_state(folder).tensors for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("optimizer.momentum_buffer.") for name in states[0])
    assert any(name.startswith("optimizer.exp_avg.") for name in states[0])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    losses = [[line["loss"] for line in read_log(tmp_path / name / "log.jsonl")] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_an_average_that_is_not_there_or_does_not_fit(tmp_path):
    run(recipe(tmp_path, steps=1), tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"ema.safetensors: no such file; a run keeps an average .* train.ema_decay"):
        load_run(tmp_path / "without", weights="ema")
    result = run(recipe(tmp_path, steps=1, ema_decay=0.5), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"train.ema_decay: 0.5 -> 0.6"):
        run(recipe(tmp_path, steps=2, ema_decay=0.6), tmp_path / "out", resume=True)
    other = Average(build(recipe(tmp_path, model={"d_model": 16})), 0.5)
    with pytest.raises(CheckpointError, match=r"x: .* has shape"):
        other.load(load_file(result.checkpoint / "ema.safetensors"), where="x")
    with pytest.raises(CheckpointError, match=r"x: final_norm.weight is missing"):
        other.load({k: v for k, v in other.tensors.items() if k != "final_norm.weight"}, where="x")
    (result.checkpoint / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"ema.safetensors: no such file"):
        run(recipe(tmp_path, steps=2, ema_decay=0.5), tmp_path / "out", resume=True)
    assert load_run(tmp_path / "out").step == 1


def test_fine_tuning_averages_from_the_weights_it_starts_from(tmp_path):
    first = run(recipe(tmp_path, steps=2), tmp_path / "first")
    other = recipe(tmp_path, steps=1, lr=1e-30, weight_decay=0.0, ema_decay=0.9)
    tuned = run(other, tmp_path / "b", init_from=tmp_path / "first")
    for name, value in load_file(tuned.checkpoint / "ema.safetensors").items():
        torch.testing.assert_close(value, dict(first.model.named_parameters())[name].detach(), rtol=0, atol=1e-7)


def test_checkpoints_in_several_files(tmp_path):
    options = {"steps": 4, "save_every": 2, "ema_decay": 0.5}
    whole = run(recipe(tmp_path, **options), tmp_path / "whole")
    result = run(recipe(tmp_path, max_shard_bytes=3000, **options), tmp_path / "out")
    files = {p.name for p in result.checkpoint.iterdir()}
    assert {"model.safetensors.index.json", "ema.safetensors.index.json", "trainer.safetensors.index.json"} <= files
    assert "model-00001-of-00003.safetensors" in files
    assert "weights.safetensors" not in files
    assert_equal_weights(load_model(tmp_path / "out"), whole.model)
    assert_equal_weights(load_model(tmp_path / "out", weights="ema"), load_model(tmp_path / "whole", weights="ema"))
    # What is resumed may be written another way; both go on alike.
    longer = {**options, "steps": 6}
    runs = [run(recipe(tmp_path, **longer), tmp_path / name, resume=True) for name in ("whole", "out")]
    assert_equal_weights(runs[0].model, runs[1].model)
    assert (runs[1].checkpoint / "weights.safetensors").is_file()
    assert_equal_weights(run(recipe(tmp_path), tmp_path / "new", init_from=result.checkpoint).model, run(
        recipe(tmp_path), tmp_path / "new2", init_from=whole.checkpoint).model)


def test_a_checkpoint_with_a_missing_part_is_not_whole(tmp_path):
    result = run(recipe(tmp_path, steps=4, save_every=2, max_shard_bytes=3000), tmp_path / "out")
    (result.checkpoint / "model-00002-of-00003.safetensors").unlink()
    words = r"step-00000004/model-00002-of-00003.safetensors: no such file.*steps whose model is whole: 2$"
    with pytest.raises(CheckpointError, match=words):
        load_run(tmp_path / "out")
    assert load_run(tmp_path / "out", step=2).step == 2
