"""Studies that train every recipe on several tasks: what they show, and that their recipes are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtf.core import BuildContext
from hybridtf.cost.parameters import parameter_counts
from hybridtf.search import load_space
from hybridtf.search.trials import at_params
from hybridtf.studies import Measures, find_study, run_study
from hybridtf.studies.mad import ALIKE, HYBRID, MAD, TEXT
from hybridtf.studies.one_stack import ABILITIES, OTHERS
from hybridtf.studies.present import finding_markdown
from hybridtf.studies.ranks import spearman, spearman_interval
from tests.studies import study_cases as cases


@pytest.mark.parametrize("name", ["mad", "one_stack"])
def test_recipes_of_a_study_are_equal_in_parameters_on_every_task(name: str) -> None:
    study = find_study(name)
    for task in study.tasks:
        recipes = study.load(task)
        counts = [parameter_counts(r.model.build(BuildContext(d_model=0, device="meta")))["total"] for r in recipes.values()]
        assert max(counts) <= 1.01 * min(counts)


def test_tasks_of_studies_can_be_made_and_their_groups_are_those_that_findings_read() -> None:
    for name in ("mad", "one_stack"):
        for task, made in find_study(name).tasks.items():
            assert (made.make(smoke=True) != made.make()) == (task != TEXT)
    made = find_study("one_stack").tasks["recall"].make()
    assert {"256 tokens, 32 pairs"} <= {size.name for size in made.test}
    sizes = {task: {size.name for size in find_study("one_stack").tasks[task].make().test} for task, _, _ in ABILITIES.values()}
    assert all(group in sizes[task] for task, group, _ in ABILITIES.values())


def mad_records(scores: dict[str, float], bits: dict[str, float], seeds: int = 2) -> list[dict[str, Any]]:
    found = []
    for name in scores:
        for task in MAD:
            found += cases.over_seeds(name, {"64 tokens": scores[name]}, task=task, seeds=seeds)
        found += cases.over_seeds(name, {"": bits[name]}, task=TEXT, seeds=seeds)
    return found


def test_mad_is_shown_and_not_shown() -> None:
    study = find_study("mad")
    names = (*ALIKE, *HYBRID)
    rising = {name: 0.3 + 0.05 * i for i, name in enumerate(names)}
    falling = {name: 3.0 - 0.1 * i for i, name in enumerate(names)}
    shown = study.finding(mad_records(rising, falling))
    assert [c.verdict for c in shown.claims] == ["shown"] * 3
    assert shown.claims[0].mean == pytest.approx(-1.0)
    assert shown.notes[0].startswith(f"Seed 0, MAD score and bits a byte: {HYBRID[-1]} 0.800, 2.000; ")
    opposite = study.finding(mad_records({n: 1 - v for n, v in rising.items()}, falling))
    assert [c.verdict for c in opposite.claims] == ["not shown"] * 3
    few = {name: rising[name] for name in names[2:]}  # a correlation over nine stacks is none
    assert [c.verdict for c in study.finding(mad_records(few, falling)).claims] == ["not measured"] * 3
    missing = [r for r in mad_records(rising, falling) if (r["recipe"], r["task"]) != ("gla", "compression")]
    assert [c.verdict for c in study.finding(missing).claims] == ["not measured"] * 3


def test_rank_correlation_and_its_interval() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 25, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0
    one = [float(i) for i in range(20)]
    low, high = spearman_interval(one, [v + (7 * i % 5) for i, v in enumerate(one)])
    assert 0.7 < low < spearman(one, [v + (7 * i % 5) for i, v in enumerate(one)]) < high <= 1
    low, high = spearman_interval(one, [float(7 * i % 20) for i in range(20)])
    assert low < 0 < high


def one_stack_records(reached: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        record for recipe, values in reached.items() for ability, value in values.items()
        for record in cases.over_seeds(recipe, {ABILITIES[ability][1]: value}, task=ABILITIES[ability][0])
    ]


def test_one_stack_is_shown_and_not_shown() -> None:
    study = find_study("one_stack")
    held = dict.fromkeys(ABILITIES, 0.99)
    as_thought = {
        "delta_product": held, "delta_negative": {**held, "permutations": 0.4}, "delta_positive": {**held, "parity": 0.5},
        "delta_alone": {**held, "recall": 0.2}, "mamba2_attention": {**held, "parity": 0.5},
        "rope_attention": dict.fromkeys(ABILITIES, 0.2),
    }
    shown = study.finding(one_stack_records(as_thought))
    assert [c.verdict for c in shown.claims] == ["shown"] * 10
    assert "held: delta_product all at once; delta_negative recall, length, parity; " in shown.notes[0]
    assert shown.notes[0].endswith("rope_attention nothing")
    reached = {name: dict.fromkeys(ABILITIES, 0.5) for name in ("delta_product", "delta_negative")}
    not_shown = study.finding(one_stack_records(reached | dict.fromkeys(OTHERS, held)))
    assert [c.verdict for c in not_shown.claims] == ["not shown"] * 10
    partly = study.finding(one_stack_records({"a": dict.fromkeys(list(ABILITIES)[:3], 1.0)}))
    assert partly.notes[0].endswith("a recall, length, parity (not measured: permutations)")


def test_numbers_of_one_recipe_are_told_apart_by_task() -> None:
    records = [*cases.over_seeds("a", {"24 tokens": 0.25}, task="one"), *cases.over_seeds("a", {"24 tokens": 0.75}, task="two")]
    assert Measures(records).quality("a", task="one") == dict.fromkeys(range(3), 0.25)
    text = finding_markdown(find_study("mad"), records, find_study("mad").finding(records))
    assert "| one | 24 tokens |" in text
    assert "| a | 0.250 |" in text
    assert "| a | 0.750 |" in text


def test_the_space_that_is_published_holds_the_stacks_of_the_study() -> None:
    space = load_space("studies/one_stack/layers")
    names = {stack.name for stack in space.stacks}
    assert {"p w a, p.mixer.d_conv=1", "m m a", "d w a, d.mixer.d_conv=1"} <= names
    assert len(names) == len(space.stacks) == 64


def test_every_stack_of_that_space_can_have_the_parameters_that_its_search_asks_for() -> None:
    """At the width that it is written in, so that none fails for want of one: some, all blocks among them."""
    space = load_space("studies/one_stack/layers")
    for stack in list(space.stacks)[::9]:
        sized = at_params(space.recipe(stack), 150_000, 256, stack.name)
        assert sized.model.to_dict()["d_model"] == 64, stack.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mad", "one_stack"])
def test_a_smoke_run_goes_through_every_task(name: str, tmp_path: Path) -> None:
    study = find_study(name)
    one = replace(study, recipes=study.recipes[:1])
    result = run_study(one, tmp_path, smoke=True, report=False)
    judged = [r for r in result.records if r["kind"] == "quality"]
    assert [(r["recipe"], r["task"]) for r in judged] == [(one.recipes[0], task) for task in study.tasks]
    assert len(result.last_trained()) == len(study.tasks)
    assert not any(r["failed"] for r in result.last_trained())
