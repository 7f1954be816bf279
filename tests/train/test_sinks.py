import json
import signal
import sys
import types

import pytest

from hybridtf.core import ConfigError
from hybridtf.train import Interrupted, read_log
from hybridtf.train.sinks import SINKS, flatten
from tests.train.runs import assert_equal_weights, recipe, run


class FakeRun:
    """A run of a tool that takes ``log`` and ``finish``, as wandb's and trackio's do."""

    def __init__(self, given):
        self.given, self.logged, self.closed, self.fail_at = given, [], 0, None

    def log(self, values, step):
        if self.fail_at is not None and step >= self.fail_at:
            raise ConnectionError("no route to host")
        self.logged.append((step, values))

    def finish(self):
        self.closed += 1


def fake(monkeypatch, name, fail_at=None):
    """The module ``name`` with an ``init``; what was made is in the list returned."""
    runs = []
    module = types.ModuleType(name)

    def init(**given):
        sys.stdout.write("a tool talks on stdout")
        runs.append(FakeRun(given))
        runs[-1].fail_at = fail_at
        return runs[-1]

    module.init = init
    module.finish = lambda: runs[-1].finish()  # trackio's
    monkeypatch.setitem(sys.modules, name, module)
    return runs


def fake_tensorboard(monkeypatch):
    writers = []

    class SummaryWriter:
        def __init__(self, log_dir):
            self.given, self.logged, self.closed, self.flushed = {"log_dir": log_dir}, [], 0, 0
            writers.append(self)

        def add_scalar(self, name, value, step):
            self.logged.append((step, {name: value}))

        def flush(self):
            self.flushed += 1

        def close(self):
            self.closed += 1

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return writers


def points(runs, name):
    """All that was ever sent of one curve."""
    return [(step, values[name]) for one in runs for step, values in one.logged if name in values]


def expected(out, event, name):
    return [(x["step"], float(x[name])) for x in read_log(out / "log.jsonl") if x["event"] == event and x.get(name) is not None]


def stop_at(step):
    def on_step(report):
        if report.step == step:
            signal.raise_signal(signal.SIGINT)

    return on_step


def test_a_line_becomes_flat_numbers():
    line = {"tokens": 7, "loss": 1.5, "losses": {"router": 0.1}, "lr": None, "metrics": ["a"], "how": "window", "ok": True}
    assert dict(flatten(line, "eval")) == {"eval/tokens": 7.0, "eval/loss": 1.5, "eval/losses/router": 0.1}
    assert dict(flatten({"layers": {"0.m": {"grad_norm": 2.0, "weights_of": "x"}}}, "stats")) == {
        "stats/layers/0.m/grad_norm": 2.0,
    }


def test_every_line_is_sent_to_every_sink_under_the_name_of_the_folder(tmp_path, monkeypatch, capsys):
    wandb, trackio, board = fake(monkeypatch, "wandb"), fake(monkeypatch, "trackio"), fake_tensorboard(monkeypatch)
    sinks = ["wandb", "tensorboard", "trackio"]
    made = recipe(tmp_path, sinks=sinks, eval_every=3, eval_tokens=40, stats_every=3)
    with_sinks = run(made, tmp_path / "out")
    assert_equal_weights(with_sinks.model, run(recipe(tmp_path, eval_every=3, eval_tokens=40), tmp_path / "without").model)
    for runs in (wandb, trackio, board):
        assert points(runs, "train/loss") == expected(tmp_path / "out", "train", "loss")
        assert points(runs, "eval/bits_per_byte") == expected(tmp_path / "out", "eval", "bits_per_byte")
        assert [step for step, _ in points(runs, "stats/layers/0.m/grad_norm")] == [3, 6]
        assert [one.closed for one in runs] == [1]
        steps = [step for step, _ in runs[0].logged]
        assert steps == sorted(steps)
    given = wandb[0].given
    assert (given["name"], given["project"], given["dir"]) == ("out", "hybridtf", str(tmp_path / "out"))
    assert given["config"]["model"]["d_model"] == 8
    assert given["config"]["train"]["lr"] == 0.01
    assert trackio[0].given["name"].startswith("out-")
    assert (trackio[0].given["resume"], board[0].given["log_dir"]) == ("never", str(tmp_path / "out" / "tensorboard"))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "without" / "sinks.json").exists()


def test_a_resumed_run_goes_on_without_sending_a_step_twice(tmp_path, monkeypatch):
    runs = {name: fake(monkeypatch, name) for name in ("wandb", "trackio")} | {"tensorboard": fake_tensorboard(monkeypatch)}

    class Killed(Exception):
        pass

    def kill(report):
        if report.step == 6:
            raise Killed

    def kill_sooner(report):
        if report.step == 5:
            raise Killed

    made = recipe(tmp_path, steps=9, sinks=list(runs), log_every=1, save_every=4, eval_every=3, eval_tokens=30)
    with pytest.raises(Killed):
        run(made, tmp_path / "out", on_step=kill)
    assert all(one[0].closed == 1 for one in runs.values())
    with pytest.raises(Killed):
        run(None, tmp_path / "out", resume=True, on_step=kill_sooner)
    with pytest.raises(Interrupted):
        run(None, tmp_path / "out", resume=True, on_step=stop_at(7))
    run(None, tmp_path / "out", resume=True)
    for tool in runs.values():
        assert len(tool) == 4
        assert [step for step, _ in points(tool, "train/loss")] == list(range(1, 10))
        assert points(tool, "train/loss") == expected(tmp_path / "out", "train", "loss")
        assert points(tool, "eval/loss") == expected(tmp_path / "out", "eval", "loss")
        assert all(one.closed == 1 for one in tool)
    for name in ("wandb", "trackio"):
        key = "id" if name == "wandb" else "name"
        assert len({one.given[key] for one in runs[name]}) == 1
    assert [one.given["resume"] for one in runs["trackio"]] == ["never", "allow", "allow", "allow"]


def test_a_sink_that_fails_is_named_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    wandb, trackio = fake(monkeypatch, "wandb", fail_at=3), fake(monkeypatch, "trackio")
    result = run(recipe(tmp_path, sinks=["wandb", "trackio"], log_every=1), tmp_path / "out", progress="lines")
    assert result.steps == 6
    said = capsys.readouterr().err
    assert said.count("warning: the sink wandb failed (ConnectionError: no route to host)") == 1
    assert "log.jsonl has every line" in said
    assert [step for step, _ in points(wandb, "train/loss")] == [1, 2]
    assert points(trackio, "train/loss") == expected(tmp_path / "out", "train", "loss")
    assert trackio[0].closed == 1
    # What it missed from then on, it gets when the run goes on with the tool in order; what it had, not again.
    sent = json.loads((tmp_path / "out" / "sinks.json").read_text())
    assert (sent["wandb"]["sent"]["train"], sent["trackio"]["sent"]["train"]) == (2, 6)


def test_a_sink_that_fails_in_closing_does_not_end_a_finished_run(tmp_path, monkeypatch):
    runs = fake(monkeypatch, "wandb")

    def broken(self):
        raise RuntimeError("no flush")

    monkeypatch.setattr(FakeRun, "finish", broken)
    assert run(recipe(tmp_path, sinks=["wandb"]), tmp_path / "out").steps == 6
    assert len(runs) == 1


def test_a_missing_package_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"train.sinks: wandb cannot be imported .*pip install 'hybridtf\[track\]'"):
        run(recipe(tmp_path, sinks=["wandb"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sink_that_cannot_be_opened_is_said_before_training(tmp_path, monkeypatch):
    trackio, wandb = fake(monkeypatch, "trackio"), fake(monkeypatch, "wandb")

    def refuse(**given):
        raise ValueError("api key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match=r"wandb could not be opened \(ValueError: api key not configured\); take it out"):
        run(recipe(tmp_path, sinks=["trackio", "wandb"]), tmp_path / "out")
    assert (wandb, trackio[0].closed) == ([], 1)
    # Nothing was trained: the same folder can be used without it.
    assert run(recipe(tmp_path, sinks=["trackio"]), tmp_path / "out").steps == 6


def test_sinks_may_change_in_a_resumed_run(tmp_path, monkeypatch):
    run(recipe(tmp_path, steps=2, log_every=1), tmp_path / "out")
    wandb = fake(monkeypatch, "wandb")
    (tmp_path / "out" / "sinks.json").write_text("torn")
    run(recipe(tmp_path, steps=4, log_every=1, sinks=["wandb"]), tmp_path / "out", resume=True)
    assert [step for step, _ in points(wandb, "train/loss")] == [3, 4]
    assert json.loads((tmp_path / "out" / "sinks.json").read_text())["wandb"]["sent"]["train"] == 4


# -- the real ones -----------------------------------------------------------------------------------------------------


def assert_same_curve(found, wanted):
    """No step twice, none missing."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)


def twice(tmp_path, name):
    """A run of six steps, cut off after four; what the log says in the end."""
    made = recipe(tmp_path, sinks=[name], log_every=1, save_every=2, eval_tokens=30)
    with pytest.raises(Interrupted):
        run(made, tmp_path / "out", on_step=stop_at(4))
    run(None, tmp_path / "out", resume=True)
    return expected(tmp_path / "out", "train", "loss")


@pytest.mark.filterwarnings("default")
def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = twice(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    found.Reload()
    assert_same_curve([(e.step, e.value) for e in found.Scalars("train/loss")], wanted)
    assert "eval/bits_per_byte" in found.Tags()["scalars"]


@pytest.mark.filterwarnings("default")
def test_trackio_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio")
    wanted = twice(tmp_path, "trackio")
    (one,) = trackio.Api().runs("hybridtf")
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs("hybridtf", one.name, run_id=one.id)
    assert_same_curve([(line["step"], line["train/loss"]) for line in lines if "train/loss" in line], wanted)


@pytest.mark.filterwarnings("default")
def test_wandb_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb")
    twice(tmp_path, "wandb")
    places = list((tmp_path / "out" / "wandb").glob("offline-run-*"))
    assert len({place.name.rpartition("-")[2] for place in places}) == 1


def test_the_table_of_sinks_is_complete():
    from typing import get_args

    from hybridtf.train.config import SinkName

    assert set(SINKS) == set(get_args(SinkName))
