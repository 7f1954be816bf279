import json
import signal

import pytest
import torch

from hybridtf.core import CheckpointError, ConfigError
from hybridtf.train import Interrupted, RunFolder, load_run, read_log, train
from hybridtf.train.checkpoint import read_trainer_state
from tests.train.runs import assert_equal_weights, recipe, run

TIMES = {"seconds", "tokens_per_second"}


def lines(out):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_log(out / "log.jsonl")]


def ctrl_c_at(step):
    def on_step(report):
        if report.step == step:
            signal.raise_signal(signal.SIGINT)

    return on_step


def assert_same_run(left, right):
    """Weights, moments, random states, data position and log, bit for bit."""
    folders = [RunFolder(path).checkpoint() for path in (left, right)]
    assert_equal_weights(*(load_run(folder).model for folder in folders))
    states = [read_trainer_state(folder) for folder in folders]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in states[0].tensors)
    for name, value in states[0].tensors.items():
        assert torch.equal(value, states[1].tensors[name]), name
    for key in ("step", "tokens", "stream", "scaler", "since_log"):
        assert states[0].data[key] == states[1].data[key], key
    assert lines(left) == lines(right)


@pytest.mark.parametrize("options", [
    {"accumulation": 2},
    {"schedule": "wsd", "precision": "bf16", "checkpoint_layers": "all"},
    {"accumulation": 3, "log_every": 5, "eval_every": 2, "eval_tokens": 40, "save_every": 2},
])
def test_stopped_and_resumed_equals_straight_through(tmp_path, options):
    made = recipe(tmp_path, steps=8, **options)
    run(made, tmp_path / "whole")
    with pytest.raises(Interrupted) as caught:
        run(made, tmp_path / "parts", on_step=ctrl_c_at(3))
    assert (caught.value.step, caught.value.exit_code) == (3, 130)
    assert caught.value.path == tmp_path / "parts" / "checkpoints" / "step-00000003"
    assert str(caught.value.path) in str(caught.value)
    run(made, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_n_steps_and_n_more_equal_two_n(tmp_path):
    options = {"schedule": "constant", "accumulation": 2, "save_every": 3}
    run(recipe(tmp_path, steps=8, **options), tmp_path / "whole")
    run(recipe(tmp_path, steps=4, **options), tmp_path / "parts")
    run(recipe(tmp_path, steps=8, **options), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_work_after_the_last_checkpoint_is_done_again(tmp_path):
    made = recipe(tmp_path, steps=7, save_every=3, log_every=1)
    whole = run(made, tmp_path / "whole")

    class Killed(Exception):
        pass

    def die(report):
        if report.step == 5:
            raise Killed

    with pytest.raises(Killed):
        run(made, tmp_path / "parts", on_step=die)
    with (tmp_path / "parts" / "log.jsonl").open("a") as handle:
        handle.write('{"event": "train", "st')
    assert [line["step"] for line in read_log(tmp_path / "parts" / "log.jsonl")] == [1, 2, 3, 4]
    again = run(None, tmp_path / "parts", resume=True)
    assert (again.steps, again.tokens) == (whole.steps, whole.tokens)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_two_runs_are_equal_and_the_seed_matters(tmp_path):
    made = recipe(tmp_path)
    first, second = run(made, tmp_path / "a"), run(made, tmp_path / "b")
    other = run(recipe(tmp_path, seed=1), tmp_path / "c")
    assert_equal_weights(first.model, second.model)
    assert not torch.equal(first.model.stem.embedding.weight, other.model.stem.embedding.weight)


def test_the_callers_random_state_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(recipe(tmp_path), tmp_path / "out")
    assert torch.equal(torch.rand(3), expected)


def test_how_often_to_evaluate_changes_nothing(tmp_path):
    often = run(recipe(tmp_path, eval_every=1, eval_tokens=30), tmp_path / "a")
    never = run(recipe(tmp_path), tmp_path / "b")
    assert_equal_weights(often.model, never.model)


def test_a_model_that_draws_numbers_in_an_evaluation_changes_nothing(tmp_path, monkeypatch):
    import hybridtf.train.run as run_module

    never = run(recipe(tmp_path), tmp_path / "b")
    real = run_module.evaluate

    def drawing(*args, **options):
        torch.rand(5)
        return real(*args, **options)

    monkeypatch.setattr(run_module, "evaluate", drawing)
    often = run(recipe(tmp_path, eval_every=1, eval_tokens=30), tmp_path / "a")
    assert_equal_weights(often.model, never.model)


def test_a_changed_recipe_is_refused_naming_what_differs(tmp_path):
    run(recipe(tmp_path), tmp_path / "out")
    with pytest.raises(CheckpointError) as caught:
        run(recipe(tmp_path, lr=0.5, steps=9), tmp_path / "out", resume=True)
    assert "train.lr: 0.01 -> 0.5" in str(caught.value)
    assert "train.steps:" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"model\.d_model: 8 -> 16"):
        run(recipe(tmp_path, model={"d_model": 16}), tmp_path / "out", resume=True)


def test_what_may_change(tmp_path):
    run(recipe(tmp_path), tmp_path / "out")
    longer = recipe(tmp_path, steps=8, log_every=1, save_every=1, keep_checkpoints=1, eval_every=4, eval_tokens=20)
    assert run(longer, tmp_path / "out", resume=True).steps == 8
    assert [p.name for p in sorted((tmp_path / "out" / "checkpoints").glob("step-*"))] == ["step-00000008"]
    assert "steps = 8" in (tmp_path / "out" / "recipe.toml").read_text()


def test_a_finished_run_resumed_is_not_evaluated_again(tmp_path, monkeypatch):
    import hybridtf.train.run as run_module

    whole = run(recipe(tmp_path, eval_tokens=50), tmp_path / "out")
    assert whole.eval_seconds > 0
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    monkeypatch.setattr(run_module, "evaluate", None)
    again = run(None, tmp_path / "out", resume=True)
    assert (again.evaluation, again.metrics, again.eval_seconds) == (None, dict(whole.metrics), 0.0)
    run(recipe(tmp_path, eval_tokens=0), tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("option", [{"eval_tokens": 60}, {"eval_tokens": 50, "eval_context": "document"}])
def test_a_changed_evaluation_of_a_finished_run_replaces_its_line(tmp_path, monkeypatch, option):
    import hybridtf.train.run as run_module

    run(recipe(tmp_path, eval_tokens=50), tmp_path / "out")
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    changed = recipe(tmp_path, **option)

    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            run(changed, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before
    again = run(changed, tmp_path / "out", resume=True)
    found = [line for line in lines(tmp_path / "out") if line["event"] == "eval"]
    assert len(found) == 1
    assert option.items() <= found[0].items()
    assert found[0]["n_tokens"] == again.evaluation.n_tokens


def test_an_evaluation_that_was_interrupted_is_made_up_for(tmp_path):
    made = recipe(tmp_path, eval_every=3, eval_tokens=50)
    run(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(made, tmp_path / "parts", on_step=ctrl_c_at(3))
    assert "eval" not in {line["event"] for line in lines(tmp_path / "parts")}
    run(made, tmp_path / "parts", resume=True)
    # Its line comes after the train lines of the same step, as in the whole run: log_every does not divide 3.
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_fewer_steps_than_are_done_are_refused(tmp_path):
    run(recipe(tmp_path), tmp_path / "out")
    with pytest.raises(ConfigError, match="is at step 6, past the 5 steps"):
        run(recipe(tmp_path, steps=5), tmp_path / "out", resume=True)


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    made, out = recipe(tmp_path), tmp_path / "out"
    out.mkdir()
    for name in ("a.csv", "b.csv", "c.csv", "thesis.tex"):
        (out / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"out: holds a\.csv, b\.csv, c\.csv and 1 more, and no run; choose an empty"):
        run(made, out)
    assert sorted(p.name for p in out.iterdir() if not p.name.startswith(".")) == ["a.csv", "b.csv", "c.csv", "thesis.tex"]


def test_a_run_is_not_overwritten(tmp_path):
    made = recipe(tmp_path)
    run(made, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds a run already \(step-00000006\); resume it"):
        run(made, tmp_path / "out")


@pytest.mark.parametrize("was_there", [False, True])
def test_a_run_whose_first_step_raises_leaves_no_folder(tmp_path, monkeypatch, was_there):
    def boom(*_, **__):
        raise KeyError("gone")

    out = tmp_path / "out"
    if was_there:
        out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("hybridtf.train.run.accumulate", boom)
        with pytest.raises(KeyError):
            run(recipe(tmp_path), out)
    assert (out.is_dir(), [*out.glob("*")]) == (was_there, [])


def test_what_was_done_before_a_step_that_raises_stays(tmp_path, monkeypatch):
    out = tmp_path / "out"

    def boom(report):
        if report.step == 2:
            raise KeyError("gone")

    with pytest.raises(KeyError):
        run(recipe(tmp_path, save_every=1), out, on_step=boom)
    assert RunFolder(out).latest().name == "step-00000001"
    with monkeypatch.context() as patch:
        patch.setattr("hybridtf.train.run.accumulate", lambda *_, **__: boom(None))
        with pytest.raises(AttributeError):
            run(None, out, resume=True)
    assert RunFolder(out).latest().name == "step-00000001"
    assert run(None, out, resume=True).steps == 6


def test_a_run_of_which_no_step_was_saved_begins_anew_and_says_so(tmp_path, capsys):
    out = tmp_path / "out"

    def boom(report):
        raise KeyError("gone")

    with pytest.raises(KeyError):
        run(recipe(tmp_path), out, on_step=boom)
    assert RunFolder(out).latest().name == "step-00000000"
    capsys.readouterr()
    assert train(recipe(tmp_path), out, device="cpu", progress="lines").steps == 6
    assert f"{out}: held a run of which no step was saved; it begins anew\n" in capsys.readouterr().err


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no checkpoint. Steps: none"):
        run(recipe(tmp_path), tmp_path / "nothing", resume=True)
    with pytest.raises(ConfigError, match="a new run needs a recipe"):
        run(None, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="give one of them"):
        run(recipe(tmp_path), tmp_path / "nothing", resume=True, init_from=tmp_path)


def test_other_data_under_the_same_recipe_is_refused(tmp_path):
    made = recipe(tmp_path, schedule="constant")
    run(made, tmp_path / "out")
    for text in (tmp_path / "texts").iterdir():
        text.write_text(text.read_text() + " more")
    with pytest.raises(CheckpointError, match="data stream: the state is of documents"):
        run(None, tmp_path / "out", resume=True)


def test_another_kind_of_device_is_refused(tmp_path):
    run(recipe(tmp_path), tmp_path / "out")
    file = RunFolder(tmp_path / "out").checkpoint() / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "cuda"}))
    with pytest.raises(CheckpointError, match="trained on 'cuda' and continues exactly only there, not on 'cpu'"):
        run(None, tmp_path / "out", resume=True)


@pytest.mark.parametrize(("file", "content", "words"), [
    ("trainer.json", "{", "not readable as JSON"), ("trainer.json", "[]", "is not the trainer state"),
    ("trainer.json", '{"format": 1, "device": "cpu"}', "incomplete"),
    ("trainer.json", None, "step-00000006/trainer.json: no such file"),
    ("trainer.safetensors", "x", "not a readable safetensors file"),
    ("trainer.safetensors", None, "step-00000006/trainer.safetensors: no such file"),
])
def test_a_broken_trainer_state_is_one_clear_line(tmp_path, file, content, words):
    run(recipe(tmp_path, keep_checkpoints=1), tmp_path / "out")
    place = RunFolder(tmp_path / "out").checkpoint() / file
    place.unlink() if content is None else place.write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        run(None, tmp_path / "out", resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["linked", "current"])
def test_a_first_step_that_raises_is_told_where_its_folder_cannot_be_removed(tmp_path, monkeypatch, kind):
    """Only what the run wrote goes: a linked folder and the working directory stay, empty, and hide nothing."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "linked").symlink_to(real)
    asked = recipe(tmp_path)
    monkeypatch.chdir(real)

    def boom(*_, **__):
        raise ValueError("the real cause")

    monkeypatch.setattr("hybridtf.train.run.accumulate", boom)
    with pytest.raises(ValueError, match="the real cause"):
        run(asked, tmp_path / "linked" if kind == "linked" else ".")
    assert real.is_dir()
    assert not any(real.iterdir())
