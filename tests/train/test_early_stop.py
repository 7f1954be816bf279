"""``stop_at``: a run ends at the first check that finds the task learnt, the same step whenever it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.tasks import Totals
from hybridtf.train import Interrupted, RunFolder, TrainConfig, evaluate, load_run, read_log
from hybridtf.train.early_stop import stopped_at_step
from tests.train import runs
from tests.train.test_resume import assert_same_run, ctrl_c_at, lines

EVERY, STEPS = 3, 13


def drawn(folder: Path, **options: object) -> Recipe:
    """The tiny recipe on drawn rows of two lengths, the longer one last."""
    table = runs.table(folder, seq_len=6, lr=3e-2, steps=STEPS, stop_every=EVERY, save_every=4, **options)
    sizes = [{"length": 6, "n_rows": 64}, {"length": 40, "n_rows": 8}]
    table["task"] = {"type": "word_problem", "group": "z2", "train": sizes[:1], "test": sizes}
    return parse_recipe(table, sections={"train": TrainConfig})


def checks(out: Path) -> dict[int, float]:
    """The score of each check by step."""
    return {line["step"]: line["value"] for line in lines(out) if line["event"] == "check"}


def reachable(folder: Path, made: Recipe) -> tuple[float, int]:
    """A score that is first reached at some step but the first check's, and that step; by a run that never stops."""
    runs.run(made, folder / "never")
    found = checks(folder / "never")
    assert list(found) == [3, 6, 9, 12]
    sign = 1 if made.task.load(0).higher_is_better else -1
    best = [step for step in found if step > 3 and all(sign * found[step] > sign * found[s] for s in found if s < step)]
    assert best, "the run does not get better; another seed or rate is needed"
    return found[best[0]], best[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``never`` is a run that no check ended."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def never(folder: Path) -> tuple[float, int]:
    """A score that its checks reach, and the first step that does."""
    return reachable(folder, drawn(folder, stop_at=2.0))


def test_a_run_ends_at_the_first_check_that_is_as_good(tmp_path: Path, folder: Path, never: tuple[float, int]) -> None:
    level, step = never
    result = runs.run(drawn(tmp_path, stop_at=level, eval_tokens="all", eval_every=step), tmp_path / "stopped")
    assert result.steps == result.stopped_at_step == step
    assert RunFolder(tmp_path / "stopped").checkpoint() == result.checkpoint == RunFolder(tmp_path / "stopped").checkpoint(step)
    log = lines(tmp_path / "stopped")
    assert [line["step"] for line in log if line["event"] == "train"][-1] == step
    assert [line["step"] for line in log if line["event"] == "eval"] == [step]  # the one at the end, made once
    assert [line["reached"] for line in log if line["event"] == "check"] == [False] * (step // EVERY - 1) + [True]
    assert stopped_at_step(read_log(tmp_path / "stopped" / "log.jsonl")) == step
    assert stopped_at_step(read_log(folder / "never" / "log.jsonl")) is None


def test_the_check_is_of_the_first_group_alone(folder: Path, never: tuple[float, int]) -> None:
    run = load_run(folder / "never", step=12, device="cpu")
    task = run.recipe.task.load(0)
    whole = evaluate(run.model, task, seq_len=6, batch_size=2)
    first, second = whole.by_group.values()
    score = sum((each.totals for each in first), Totals()).accuracy
    assert checks(folder / "never")[12] == score
    assert score != whole.totals.accuracy
    part = evaluate(run.model, task, seq_len=6, batch_size=2, first_group=True)
    assert ([s.totals for s in part.by_document], part.complete) == ([s.totals for s in first], False)
    few = evaluate(run.model, task, seq_len=6, batch_size=2, first_group=True, max_tokens=30)
    assert [s.totals for s in few.by_document] == [s.totals for s in first[:4]]  # two batches of 12 tokens
    assert len(second) == 8


def test_checks_change_nothing_but_the_end(tmp_path: Path, folder: Path, never: tuple[float, int]) -> None:
    plain = drawn(tmp_path, stop_at=2.0)
    config = plain.train.model_copy(update={"stop_at": None, "stop_every": 50})
    runs.run(plain.model_copy(update={"train": config}), tmp_path / "plain")
    models = [load_run(out, device="cpu").model for out in (folder / "never", tmp_path / "plain")]
    runs.assert_equal_weights(*models)  # dropout is on: a check that drew numbers would show


@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_killed_and_resumed_it_ends_at_the_same_step(tmp_path: Path, never: tuple[float, int], at: int) -> None:
    level, step = never
    made = drawn(tmp_path, stop_at=level)
    runs.run(made, tmp_path / "whole")
    if at > step:
        pytest.skip("the run has ended before")
    with pytest.raises(Interrupted):
        runs.run(made, tmp_path / "parts", on_step=ctrl_c_at(at))
    result = runs.run(None, tmp_path / "parts", resume=True)
    assert result.stopped_at_step == step
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    again = runs.run(None, tmp_path / "parts", resume=True)
    assert (again.steps, again.stopped_at_step) == (step, step)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_stopped_run_goes_on_where_more_is_asked_for(tmp_path: Path, folder: Path, never: tuple[float, int]) -> None:
    level, step = never
    made = drawn(tmp_path, stop_at=level)
    assert runs.run(made, tmp_path / "out").steps == step
    result = runs.run(drawn(tmp_path, stop_at=2.0), tmp_path / "out", resume=True)
    assert (result.steps, result.stopped_at_step) == (STEPS, None)
    runs.assert_equal_weights(*(load_run(out, device="cpu").model for out in (tmp_path / "out", folder / "never")))
    assert stopped_at_step(read_log(tmp_path / "out" / "log.jsonl")) is None


def test_where_lower_is_better_a_lower_score_ends_it(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, steps=STEPS, stop_every=EVERY, lr=1e-2, stop_at=0.0)
    level, step = reachable(tmp_path, made)
    config = made.train.model_copy(update={"stop_at": level})
    result = runs.run(made.model_copy(update={"train": config}), tmp_path / "out")
    assert result.stopped_at_step == step
