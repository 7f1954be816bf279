"""compare: a record for everything, and an interrupted comparison goes on where it stopped."""

import shutil

import pytest
import torch

from hybridtf.bench import CompareOptions, Subject, compare, read_records, select
from hybridtf.bench import learning as module
from hybridtf.bench.arms import Tasks, groups_of
from hybridtf.bench.recorded import has_memory, has_speeds, sizes_of
from hybridtf.core import ConfigError, NonFiniteError, RecipeError
from tests.bench.bench_cases import TASK, TRAIN, recipe

OPTIONS = CompareOptions(
    progress="none", context=20, repeats=2, warmup=0, multiples=(1, 2), max_documents=3, eval_tokens=600
)


def recipes(*patterns, **train):
    return {p: recipe(p, task=TASK, train={**TRAIN, **train}) for p in patterns}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    said = []
    records = compare(recipes("a", "m"), out, seeds=(0, 3), options=OPTIONS, say=said.append)
    return out, records, said


def test_everything_is_recorded_once(finished):
    out, _, _ = finished
    records = read_records(out / "records.jsonl")
    for name in ("a", "m"):
        for seed in (0, 3):
            for kind in ("train", "model", "quality", "extrapolation"):
                assert len(select(records, kind, recipe=name, seed=seed)) == 1, (name, seed, kind)
        memory = select(records, "memory", recipe=name)
        assert {(r["phase"], r["seed"]) for r in memory} == {("train", 0), ("decode", 0)}
        assert [r["phase"] for r in select(records, "speed", recipe=name)] == ["train", "prefill", "decode"]
    assert len({r["recipe_hash"] for r in records}) == 2


def test_the_curve_is_that_of_the_run(finished):
    out, _, _ = finished
    (found,) = select(read_records(out / "records.jsonl"), "train", recipe="m", seed=3)
    assert [point[0] for point in found["curve"]] == [2, 4, 6]
    assert found["steps"] == 6
    assert found["tokens"] == found["curve"][-1][1]
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert found["failed"] is None


def test_the_records_of_these_recipes_come_back(finished):
    out, records, _ = finished
    assert records == read_records(out / "records.jsonl")
    alone = compare(recipes("m"), out, seeds=(0, 3), options=OPTIONS)
    assert {r["recipe"] for r in alone} == {"m"}


def test_documents_that_are_too_few_do_not_end_a_comparison(finished, monkeypatch):
    """One document has no interval: the trained models have a record that says so, which is not asked for again."""
    out, _, _ = finished
    monkeypatch.setattr(module, "train", None)
    other = CompareOptions(**{**vars(OPTIONS), "max_documents": 1})
    for _ in range(2):
        found = select(compare(recipes("m"), out, options=other), "extrapolation", recipe="m", seed=0)
        last = found[-1]
        assert [r["max_documents"] for r in found] == [3, 1]
        assert [(e["length"], e["result"], e["bits_per_byte"]) for e in last["by_length"]] == [
            (24, "not_run", None), (48, "not_run", None),
        ]
        assert "fewer than 2 held-out documents" in last["note"]


def test_another_way_to_measure_is_measured(finished, monkeypatch):
    out, _, _ = finished
    monkeypatch.setattr(module, "train", None)
    other = CompareOptions(**{**vars(OPTIONS), "eval_tokens": 300})
    more = compare(recipes("m"), out, options=other)
    found = select(more, "quality", recipe="m", seed=0)
    assert [r["max_tokens"] for r in found] == [600, 300]
    assert len([r for r in select(more, "extrapolation", recipe="m", seed=0) if r["max_documents"] == 3]) == 1


def test_more_rounds_and_a_limit_are_measured(finished, tmp_path, monkeypatch):
    """What was recorded in fewer rounds, or without the limit, is no answer to what is asked now."""
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    monkeypatch.setattr(module, "train", None)
    other = CompareOptions(**{
        **vars(OPTIONS), "repeats": 3, "limit_bytes": 60_000, "speed_phases": ("prefill",), "memory_phases": ("decode",)
    })
    more = compare(recipes("a", "m"), folder, options=other)
    for name in ("a", "m"):
        assert [r["repeats"] for r in select(more, "speed", recipe=name, phase="prefill")] == [2, 3]
        longest = [r["longest"] for r in select(more, "memory", recipe=name, phase="decode")]
        assert longest[0] is None
        assert longest[1]["limit_bytes"] == 60_000
    before = (folder / "records.jsonl").read_bytes()
    compare(recipes("a", "m"), folder, options=OPTIONS)  # all of it is there, in more rounds
    assert (folder / "records.jsonl").read_bytes() == before


def test_speeds_of_different_sessions_are_measured_again(tmp_path):
    """Each alone, then both: times of one session alone stand side by side."""
    quick = CompareOptions(**{**vars(OPTIONS), "speed_phases": ("decode",), "memory_phases": (), "steps": 2})
    for names in (("a",), ("m",), ("a", "m")):
        records = compare(recipes(*names), tmp_path, options=quick)
    ours, theirs = (select(records, "speed", recipe=name) for name in ("a", "m"))
    assert [len(ours), len(theirs)] == [2, 2]
    assert ours[0]["session"] != theirs[0]["session"]
    assert ours[1]["session"] == theirs[1]["session"]
    assert theirs[1]["ratio"]["against"] == "a"
    said = []
    compare(recipes("m", "a"), tmp_path, options=quick, say=said.append)
    assert said == []


def test_other_threads_are_another_speed(finished, monkeypatch):
    _, records, _ = finished
    arms = groups_of(recipes("a"), OPTIONS, Tasks())[0]
    subject, sizes = arms[0].subject(0), sizes_of(arms, "decode", OPTIONS)
    assert has_speeds(records, [subject], "decode", sizes, OPTIONS)
    assert has_memory(records, subject, "decode", sizes, OPTIONS)
    gpu = CompareOptions(**{**vars(OPTIONS), "device": "cuda:0"})
    assert not has_speeds(records, [subject], "decode", sizes, gpu)
    assert not has_memory(records, subject, "decode", sizes, gpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert not has_speeds(records, [subject], "decode", sizes, OPTIONS)


def test_recipes_that_train_at_other_sizes_are_measured_at_the_same(tmp_path):
    quick = CompareOptions(**{**vars(OPTIONS), "speed_phases": ("train",), "memory_phases": ("train",), "steps": 2})
    large, small = recipes("a", batch_size=3, seq_len=16), recipes("m", batch_size=2, seq_len=24)
    records = compare({**large, **small}, tmp_path, options=quick)
    for kind in ("speed", "memory"):
        assert [(r["batch_size"], r["length"]) for r in select(records, kind)] == [(2, 16), (2, 16)], kind
    said = []
    compare({**small, **large}, tmp_path, options=quick, say=said.append)  # in whatever order
    assert said == []


def test_a_finished_comparison_does_nothing(finished, monkeypatch):
    out, records, _ = finished
    before = (out / "records.jsonl").read_bytes()
    monkeypatch.setattr(module, "train", None)
    said = []
    assert compare(recipes("a", "m"), out, seeds=(0, 3), options=OPTIONS, say=said.append)[: len(records)] == records
    assert said == []
    assert (out / "records.jsonl").read_bytes() == before


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    measured = []
    real = {name: getattr(module, name) for name in ("train", "measure_quality", "measure_extrapolation")}

    class Killed(BaseException):
        pass

    def note(name):
        def run(*args, **kwargs):
            measured.append(name)
            if name == "measure_extrapolation" and measured.count(name) == 1:
                raise Killed
            return real[name](*args, **kwargs)

        return run

    for name in real:
        monkeypatch.setattr(module, name, note(name))
    with pytest.raises(Killed):
        compare(recipes("a"), tmp_path, options=OPTIONS)
    path = tmp_path / "records.jsonl"
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"schema": 1, "kind": "extrap')  # the line that was being written
    records = compare(recipes("a"), tmp_path, options=OPTIONS)
    assert measured == ["train", "measure_quality", "measure_extrapolation", "measure_extrapolation"]
    assert path.read_bytes().startswith(kept)
    assert records.skipped == 1
    assert select(records, "extrapolation")[-1]["bits_per_byte"][0] is not None
    assert len(select(read_records(path, skip_corrupt=True), "train")) == 1


def test_other_steps_are_another_recipe(tmp_path):
    plain = compare(recipes("a"), tmp_path, options=OPTIONS)
    other = CompareOptions(**{**vars(OPTIONS), "steps": 3})
    compare(recipes("a"), tmp_path, options=other)
    found = select(read_records(tmp_path / "records.jsonl"), "train")
    assert [r["steps"] for r in found] == [6, 3]
    assert found[0]["recipe_hash"] != found[1]["recipe_hash"]
    assert {r["recipe_hash"] for r in plain} == {found[0]["recipe_hash"]}


def test_a_recipe_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    real = module.train

    def train(recipe, folder, **kwargs):
        if "mamba2" in str(recipe.model):
            raise NonFiniteError("step 1: the loss is not finite")
        return real(recipe, folder, **kwargs)

    monkeypatch.setattr(module, "train", train)
    records = compare(recipes("m", "a"), tmp_path, options=OPTIONS)
    bad, good = (select(records, "train", recipe=name)[-1] for name in ("m", "a"))
    assert bad["failed"] == "NonFiniteError: step 1: the loss is not finite"
    assert [r["recipe"] for r in select(records, "quality")] == ["a"]
    assert select(records, "memory", recipe="m")  # what it costs is known all the same
    assert good["failed"] is None
    # The next attempt tries it again.
    monkeypatch.setattr(module, "train", real)
    records = compare(recipes("m", "a"), tmp_path, options=OPTIONS)
    assert select(records, "train", recipe="m")[-1]["failed"] is None
    assert select(records, "quality", recipe="m")


def test_wrong_work_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one recipe"):
        compare({}, tmp_path)
    with pytest.raises(ConfigError, match="seeds that differ"):
        compare(recipes("a"), tmp_path, seeds=(1, 1))
    with pytest.raises(RecipeError, match=r"\[task\]"):
        compare({"a": recipe("a", train=TRAIN)}, tmp_path)


def test_a_subject_of_a_trained_run(finished):
    out, _, _ = finished
    (folder,) = (out / "runs").glob("m-*-seed3")
    one = Subject.from_run(folder)
    assert one.name == folder.name
    assert one.seed == 3
    assert one.recipe_hash in folder.name
    first, second = one.build(), one.build()
    assert first is not second
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    fresh = Subject.from_recipe(recipe("m"), "m", seed=3).build()
    assert not any(a.equal(b) for a, b in zip(fresh.parameters(), first.parameters(), strict=True) if a.ndim > 1)
