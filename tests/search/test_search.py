"""The search: no stack twice, resumed after a kill as if nothing had been, the best written down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hybridtf.bench import read_records
from hybridtf.core import ConfigError, HybridTFError
from hybridtf.cost.parameters import parameter_counts
from hybridtf.recipe import load_recipe, to_toml
from hybridtf.search import (
    Search,
    at_params,
    best_recipe,
    normalised,
    parse_space,
    score_of,
    scores,
    trials_markdown,
    with_third_sides,
    write_outcome,
)
from hybridtf.search.run import LOCK
from hybridtf.tasks.compression import CompressionConfig
from tests.cli.helpers import ok
from tests.search.search_cases import Known, sweep, table

optuna = pytest.importorskip("optuna")


def search(evaluate: Any, n_params: int = 12_000, **changes: Any) -> Search:
    return Search(parse_space(table(), "a.space.toml"), n_params, 16, evaluate, {"tasks": ["parity"], **changes})


def test_a_measure_stands_between_the_best_trivial_model_and_perfect() -> None:
    assert normalised(0.75, {"chance": 0.25, "most": 0.5}, higher_is_better=True) == pytest.approx(0.5)
    assert normalised(0.4, {"chance": 0.5}, higher_is_better=True) == 0
    assert normalised(2.0, {"unigram": 4.0, "uniform": 8.0}, higher_is_better=False) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="the task 'x' knows no trivial model"):
        normalised(0.4, {}, higher_is_better=True, task="x")
    groups = {"24 tokens": {"value": 1.0}, "256 tokens": {"value": 0.5}}
    assert score_of(sweep("parity", 0.9, groups=groups)) == pytest.approx(0.5)


def test_scores_are_means_and_a_failure_is_no_zero() -> None:
    found = scores([
        sweep("parity", 1.0, seed=0), sweep("parity", 0.5, seed=1),
        sweep("parity", 0.6, lr=1.0), sweep("parity", 0.6, seed=1, lr=1.0),
        sweep("s3", 0.1), sweep("s3", 0.75),  # tried again
    ])  # fmt: skip
    assert found.by_task == {"parity": pytest.approx(0.5), "s3": pytest.approx(0.5)}
    assert found.mean == pytest.approx(0.5)
    broken = scores([sweep("parity", 1.0), {**sweep("s3", 0.0), "failed": "loss is NaN", "value": None}])
    assert (broken.mean, broken.failed) == (None, {"s3": "loss is NaN"})


def test_no_stack_is_tried_twice_and_all_are_in_the_end(tmp_path: Path) -> None:
    known, said = Known(), []
    work = Search(parse_space(table()), 12_000, 16, known, {}, say=said.append)
    trials = work.run(tmp_path, 50)
    assert sorted(known.calls) == sorted(stack.name for stack in work.space.stacks)
    assert trials[0].stack.name == "d d, d.mixer.allow_neg_eigval=true"
    assert [t.score for t in trials] == sorted((t.score for t in trials), reverse=True)
    assert "all 6 stacks of the space are tried" in said[-1]
    counts = [parameter_counts(recipe.model.build())["total"] for recipe in known.recipes]
    assert all(abs(count / 12_000 - 1) <= 0.01 for count in counts)
    assert work.run(tmp_path, 50) == trials
    assert len(known.calls) == 6


def test_a_search_that_is_cut_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = Known()
    wanted = search(whole).run(tmp_path / "whole", 4)
    first, second = Known(end_at=3), Known()
    with pytest.raises(KeyboardInterrupt):
        search(first).run(tmp_path / "cut", 4)
    assert search(second).run(tmp_path / "cut", 4) == wanted
    assert first.calls + second.calls[1:] == whole.calls
    assert second.calls[0] == first.calls[-1]  # the one that was cut off, done to its end


def test_a_folder_belongs_to_one_search(tmp_path: Path) -> None:
    search(Known()).run(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"holds a search of another steps \(None, not 5\); choose another folder"):
        search(Known(), steps=5).run(tmp_path, 1)
    with pytest.raises(ConfigError, match="another params"):
        search(Known(), n_params=13_000).run(tmp_path, 1)
    with FileLock(tmp_path / LOCK), pytest.raises(ConfigError, match="another search is at work there"):
        search(Known()).run(tmp_path, 2)


def test_a_stack_that_fails_is_a_result(tmp_path: Path) -> None:
    def fails(name: str, recipe: Any) -> Any:
        return [{**sweep("parity", 0.0), "failed": "loss is NaN"}] if name.startswith("d a") else [sweep("parity", 0.75)]

    work = search(fails)
    trials = work.run(tmp_path, 6)
    assert [t.score for t in trials] == [0.5] * 4 + [None] * 2
    assert "| d a, d.mixer.allow_neg_eigval=true | failed | failed |" in trials_markdown(trials)
    assert best_recipe(work, trials).meta.title.startswith(("d d", "a d"))
    nothing = search(lambda name, recipe: [{**sweep("parity", 0.0), "failed": "loss is NaN"}])
    with pytest.raises(ConfigError, match=r"no stack could be tried to its end: .* loss is NaN"):
        best_recipe(nothing, nothing.run(tmp_path / "nothing", 1))


def test_the_best_is_a_recipe_that_says_where_it_came_from(tmp_path: Path) -> None:
    work = search(Known())
    trials = work.run(tmp_path, 6)
    write_outcome(tmp_path, trials, best_recipe(work, trials))
    best = load_recipe(tmp_path / "best.toml")
    assert best.model == work.recipe(trials[0].stack).model
    assert "The best of 6 stacks out of 6 in a.space.toml, at 12,000 parameters: score 0.800" in best.meta.description
    assert best.meta.resolved is not None
    assert best.meta.resolved.seed == 0
    assert json.loads((tmp_path / "trials.json").read_text())[0]["stack"] == trials[0].stack.name


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space = parse_space(table(), "a.space.toml")
    with pytest.raises(ConfigError, match=r"a\.space\.toml, d d: 10 parameters are out of reach"):
        at_params(space.recipe(space.stacks[0]), 10, 16, "a.space.toml, d d")
    with pytest.raises(ConfigError, match="at least one task"):
        with_third_sides({})
    assert with_third_sides({"c": CompressionConfig.tiny()})["c"].validation
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(HybridTFError, match=r"search needs optuna: pip install 'hybridtf\[sweep\]'"):
        search(Known()).run(tmp_path, 1)


def test_the_command_searches_and_measures_the_best_on_what_is_held_out(tmp_path: Path) -> None:
    space = table(search={"slots": [["d", "a"]]})
    space["model"]["max_seq_len"] = 256
    (tmp_path / "a.space.toml").write_text(to_toml(space))
    command = (
        "search", str(tmp_path / "a.space.toml"), "--task", "s3_small", "--params", "6k", "--trials", "2",
        "--eval-tokens", "300", "-o", str(tmp_path / "out"), "--json",
    )
    found = json.loads(ok(*command).stdout)
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert [r["recipe"] for r in records if r["kind"] == "sweep"] != []
    # What is held out was met by the best stack alone.
    assert {r["recipe"] for r in records if r["kind"] == "quality"} == {found["trials"][0]["stack"]}
    assert found["held_out"][0]["value"] == next(r["value"] for r in records if r["kind"] == "quality")
    best = load_recipe(tmp_path / "out" / "best.toml")
    assert best.model.pattern == found["trials"][0]["stack"]
    assert json.loads(ok(*command).stdout) == found
    assert len(read_records(tmp_path / "out" / "records.jsonl")) == len(records)
