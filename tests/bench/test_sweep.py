"""compare over tasks, learning rates and foreign models."""

from __future__ import annotations

import json
from typing import Literal

import pytest
import torch
from filelock import FileLock

from hybridtf.bench import CompareOptions, Foreign, Subject, compare, pairwise, pareto_axes, read_records, select
from hybridtf.bench import learning as module
from hybridtf.bench.arms import Tasks, groups_of
from hybridtf.bench.cells import WORDS
from hybridtf.bench.sweep import choose
from hybridtf.core import ConfigError, NonFiniteError, TaskConfig
from hybridtf.cost import count_flops
from hybridtf.cost.phases import TrainStep
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from hybridtf.train import RunFolder, TrainConfig, build_optimizer, load_model
from tests.bench.bench_cases import BLOCKS, RECALL, TASK, TRAIN, recipe, table_for

QUIET = CompareOptions(
    progress="none", multiples=(1, 2), max_documents=2, eval_tokens=400, speed_phases=(), memory_phases=()
)


def options(**changes):
    return CompareOptions(**{**vars(QUIET), **changes})


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_every_recipe_on_every_task(tmp_path):
    found = compare(
        {"a": recipe("a", train=TRAIN), "m": recipe("m", train=TRAIN)}, tmp_path,
        options=options(tasks={"recall": RECALL, "help": TASK}),
    )
    assert [(r["recipe"], r["task"]) for r in select(found, "quality")] == [
        ("a", "recall"), ("m", "recall"), ("a", "help"), ("m", "help"),
    ]
    assert {r["task"] for r in select(found, "train")} == {"recall", "help"}
    folder = next((tmp_path / "runs").glob(f"a-{select(found, 'train', task='recall')[0]['recipe_hash']}-*"))
    trained = load_model(folder).config
    assert trained.vocab_size == 12
    assert len({(r["recipe"], r["recipe_hash"]) for r in found}) == 4
    assert {d.task for d in pairwise(found)} == {"recall", "help"}
    assert {axis.task for axis in pareto_axes(found) if axis.cost == "train_flops"} == {"recall", "help"}


def test_what_a_task_asks_of_a_recipe_is_said():
    short = LanguageModelConfig(vocab_size=257, d_model=16, pattern="a", blocks={"a": BLOCKS["a"]}, max_seq_len=8)
    given = options(tasks={"recall": RECALL})
    with pytest.raises(ConfigError, match=r"short: model.max_seq_len = 8 is less than the 16 tokens of a row"):
        groups_of({"short": Recipe(model=short, train=TRAIN)}, given, Tasks())
    ((arm,),) = groups_of({"a": recipe("a", train=TRAIN)}, given, Tasks())
    assert (arm.config.seq_len, arm.recipe.model.vocab_size) == (16, 12)
    with pytest.raises(ConfigError, match="names no task"):
        options(tasks={})


def test_operations_of_the_training_are_those_of_its_steps(tmp_path):
    found = compare({"a": recipe("a", task=TASK, train={**TRAIN, "accumulation": 3})}, tmp_path, options=QUIET)
    (train,) = select(found, "train")
    subject = Subject.from_recipe(recipe("a", task=TASK, train=TRAIN), "a")
    model = subject.build()
    step = TrainStep(model, 257, 2, 24, optimizer=build_optimizer(model, TrainConfig(**TRAIN)))
    assert train["flops"] == 6 * 3 * count_flops(step.run)
    assert (train["lr"], train["result"], train["task"]) == (1e-3, "ok", "text")


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_the_best_rate_is_chosen_on_the_third_side(tmp_path):
    said = []
    rates = options(learning_rates=(1e-5, 3e-2, 1e-4))
    found = compare({"a": recipe("a", task=TASK, train=TRAIN)}, tmp_path, seeds=(0, 1), options=rates, say=said.append)
    tried = select(found, "sweep")
    assert sorted((r["lr"], r["seed"]) for r in tried) == [(lr, s) for lr in (1e-5, 1e-4, 3e-2) for s in (0, 1)]
    assert all(len(r["curve"]) == 3 and r["result"] == "ok" for r in tried)
    quality = select(found, "quality")
    assert [(r["seed"], r["lr"], r["chosen_lr"], r["swept"]) for r in quality] == [
        (s, 3e-2, 3e-2, [1e-5, 3e-2, 1e-4]) for s in (0, 1)
    ]
    assert all("the chosen lr 0.03 is the highest that was tried" in r["note"] for r in quality)
    assert {r["lr"] for r in select(found, "train")} == {3e-2}
    # What is held out was not looked at to choose: the scores are of other documents.
    by_seed = {r["seed"]: r["value"] for r in tried if r["lr"] == 3e-2}
    assert all(by_seed[r["seed"]] != r["value"] for r in quality)
    assert all("third side" not in line or "lr" in line for line in said)
    # Nothing is done twice, and a rate more is a sweep of that rate alone.
    lines = len(read_records(tmp_path / "records.jsonl"))
    compare({"a": recipe("a", task=TASK, train=TRAIN)}, tmp_path, seeds=(0, 1), options=rates)
    assert len(read_records(tmp_path / "records.jsonl")) == lines


def test_a_rate_of_which_a_seed_failed_is_not_chosen(tmp_path, monkeypatch):
    real = module.train

    def train(made, folder, **more):
        if made.train.lr == 3e-2 and made.train.seed == 1:
            raise NonFiniteError("step 2: the loss is not finite")
        return real(made, folder, **more)

    monkeypatch.setattr(module, "train", train)
    rates = options(learning_rates=(1e-4, 1e-3, 3e-2))
    found = compare({"a": recipe("a", task=TASK, train=TRAIN)}, tmp_path, seeds=(0, 1), options=rates)
    bad = select(found, "sweep", lr=3e-2, seed=1)[0]
    assert (bad["result"], bad["value"]) == ("non_finite", None)
    quality = select(found, "quality")
    assert {r["chosen_lr"] for r in quality} == {1e-3}
    assert "not chosen from, since a seed failed: lr 0.03 (non_finite)" in quality[0]["note"]


def test_refusal_12_a_failed_cell_is_a_word_and_never_averaged_over(tmp_path, monkeypatch):
    """Out of memory, timed out, not a number and crashed are four results, none is zero, and no mean is over the others."""
    real = module.train
    errors = {1: MemoryError(), 2: NonFiniteError("step 1: the loss is not finite"), 3: TypeError("a fault")}

    def train(made, folder, **more):
        if "mamba2" in str(made.model) and made.train.seed in errors:
            raise errors[made.train.seed]
        return real(made, folder, **more)

    monkeypatch.setattr(module, "train", train)
    both = {name: recipe(name, task=TASK, train=TRAIN) for name in ("m", "a")}
    found = compare(both, tmp_path, seeds=range(4), options=QUIET)
    results = {r["seed"]: r["result"] for r in select(found, "train", recipe="m")}
    assert results == {0: "ok", 1: "out_of_memory", 2: "non_finite", 3: "crashed"}
    assert set(results.values()) - {"ok"} < set(WORDS)
    assert len({WORDS[name] for name in WORDS}) == 5
    failed = [r for r in select(found, "train", recipe="m") if r["failed"]]
    assert all(r["flops"] is None and r["tokens_per_s"] is None for r in failed)
    assert [r["seed"] for r in select(found, "quality", recipe="m")] == [0]
    (difference,) = pairwise(found)
    assert (difference.verdict, difference.value) == ("unknown", None)
    assert "m, seed 1: out_of_memory" in difference.note
    assert all([p.recipe for p in axis.points] == ["a"] for axis in pareto_axes(found))


def test_choosing_is_by_mean_in_the_direction_of_the_task():
    groups = groups_of({"a": recipe("a", train=TRAIN)}, options(tasks={"r": RECALL}, learning_rates=(1, 2, 3)), Tasks())
    (group,) = groups

    def swept(*values, higher):
        return [
            {
                "kind": "sweep", "recipe": "a", "recipe_hash": arm.recipe_hash, "seed": 0, "failed": None, "result": "ok",
                "value": value, "higher_is_better": higher,
            }
            for arm, value in zip(group, values, strict=True)
        ]

    assert choose(swept(0.1, 0.3, 0.2, higher=True), group, (0,)).arm.config.lr == 2
    assert choose(swept(0.1, 0.3, 0.2, higher=True), group, (0,)).note is None
    low = choose(swept(0.1, 0.3, 0.2, higher=False), group, (0,))
    assert (low.arm.config.lr, "lowest" in low.note) == (1, True)
    not_run = choose(swept(0.1, 0.3, 0.2, higher=True), group, (0, 1))
    assert "no learning rate went well with every seed" in not_run.note
    assert "not_run" in not_run.note


def test_a_task_without_a_third_side_refuses_to_choose():
    class Bare(TaskConfig):
        type: Literal["bare"] = "bare"

        @classmethod
        def tiny(cls):
            return cls()

        def load(self, seed):
            return RECALL.load(seed)

    with pytest.raises(ConfigError, match="has no option 'validation'"):
        groups_of({"a": recipe("a", train=TRAIN)}, options(tasks={"r": Bare()}, learning_rates=(1, 2)), Tasks())
    with pytest.raises(ConfigError, match="must differ and be above 0"):
        options(learning_rates=(1e-3, 1e-3))


# -- foreign models ----------------------------------------------------------------------------------------------------


def test_a_foreign_model_is_trained_and_measured_beside_a_recipe(tmp_path):
    entrants = {
        "table": Foreign(table_for, TrainConfig(**{**TRAIN, "lr": 0.1})), "a": recipe("a", train=TRAIN),
    }
    given = options(
        tasks={"recall": RECALL, "help": TASK}, multiples=(1,), speed_phases=("train",), memory_phases=("train",), repeats=1
    )
    found = compare(entrants, tmp_path, options=given)
    for task in ("recall", "help"):
        (train,) = select(found, "train", recipe="table", task=task)
        assert train["failed"] is None
        assert train["flops"] == 0  # a table is looked up: no operation is a product
        (quality,) = select(found, "quality", recipe="table", task=task)
        assert quality["value"] is not None
        assert train["recipe_hash"] == quality["recipe_hash"]
    curve = select(found, "train", recipe="table", task="help")[0]["curve"]
    assert curve[-1][2] < curve[0][2]
    assert {r["recipe"] for r in select(found, "speed")} == {"table", "a"}
    assert len(select(found, "memory", recipe="table")) == 2
    before = (tmp_path / "records.jsonl").read_bytes()
    compare(entrants, tmp_path, options=given)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_foreign_run_resumes_bit_for_bit_and_no_other_model_takes_it_over(tmp_path):
    def run(folder, steps, build=table_for):
        config = TrainConfig(**{**TRAIN, "steps": steps, "schedule": "constant"})
        ((arm,),) = groups_of({"t": Foreign(build, config)}, options(tasks={"r": RECALL}), Tasks())
        resume = RunFolder(folder).latest() is not None
        module.train(arm.trained_with(0), folder, device="cpu", resume=resume, progress="none")
        return load_model(folder, config=arm.recipe.model)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "cut", 3)
    cut = run(tmp_path / "cut", 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))

    def wider(task):
        return torch.nn.Sequential(torch.nn.Embedding(task.vocab_size, 4), torch.nn.Linear(4, task.vocab_size))

    with pytest.raises(Exception, match=r"foreign"):
        run(tmp_path / "cut", 8, wider)


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_two_comparisons_in_one_folder_are_refused(tmp_path):
    with FileLock(tmp_path / ".compare.lock"), pytest.raises(ConfigError, match="another comparison is at work there"):
        compare({"a": recipe("a", task=TASK, train=TRAIN)}, tmp_path, options=QUIET)
    assert not (tmp_path / "records.jsonl").exists()


def test_units_of_the_records_are_small(tmp_path):
    found = compare({"a": recipe("a", task=RECALL, train={**TRAIN, "seq_len": 16})}, tmp_path, options=QUIET)
    (quality,) = select(found, "quality")
    assert quality["units"]["n_tokens"] == 1
    assert len(quality["units"]["nats"]) == quality["n_documents"] == 24
    assert len(json.dumps(quality["units"])) < 1000
