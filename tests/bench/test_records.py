"""Records: whole lines, plain finite values, faults named by file and line."""

import json
import multiprocessing

import numpy as np
import pytest
import torch

from hybridtf.bench import Identity, Subject, append_record, environment, make_record, read_records, recipe_hash, select
from hybridtf.bench.records import COMMON
from hybridtf.core import DataError
from tests.bench.bench_cases import TRAIN, recipe, subject

WHO = Identity("tiny", "0" * 16, "a", 3, 7, {"attention": {"train": "torch"}})


def record(**fields):
    return make_record("train", WHO, {"steps": 1, **fields})


def test_common_fields_come_first_and_say_who_and_where():
    made = record()
    assert tuple(made)[: len(COMMON)] == COMMON
    assert (made["schema"], made["recipe"], made["seed"], made["n_params"], made["pattern"]) == (1, "tiny", 3, 7, "a")
    assert made["environment"] == environment()


def test_the_environment_is_complete():
    found = environment()
    assert set(found) == {
        "python", "torch", "hybridtf", "plugins", "os", "cpu", "cores", "threads", "memory", "gpu", "commit", "dirty",
    }
    assert found["torch"] == torch.__version__
    assert found["threads"] == 1
    assert found["memory"] > 1 << 28
    assert found["cores"] >= 1


def test_a_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    first, second = record(text="Zürich\n"), record(pair=(1, 2.5), none=None, flag=True)
    append_record(path, first)
    append_record(path, second)
    assert read_records(path) == [first, second]
    assert read_records([path, path]) == [first, second] * 2
    assert path.read_text(encoding="utf-8").count("\n") == 2


def test_scalars_of_numpy_and_torch_become_numbers():
    made = record(
        a=np.float32(0.5), b=np.int64(3), c=torch.tensor(2.0), d=np.arange(3), e=torch.ones(2), f=np.bool_(True)
    )
    assert [made[k] for k in "abcdef"] == [0.5, 3, 2.0, [0, 1, 2], [1.0, 1.0], True]
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan"), torch.tensor([1.0, float("-inf")])])
def test_what_is_not_finite_is_refused_with_its_place(bad):
    with pytest.raises(DataError, match=r"train\.curve\[1\]"):
        record(curve=[0.0, bad])


def test_bad_records_are_refused(tmp_path):
    with pytest.raises(DataError, match="Did you mean 'memory'"):
        make_record("memroy", WHO, {})
    with pytest.raises(DataError, match="'seed' is one that every record has"):
        record(seed=1)
    with pytest.raises(DataError, match="cannot hold a set"):
        record(x={1})
    with pytest.raises(DataError, match="has no 'schema'"):
        append_record(tmp_path / "r", {"kind": "train"})


def test_a_truncated_line_is_reported_by_number_or_counted(tmp_path):
    path = tmp_path / "r.jsonl"
    append_record(path, record())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"r\.jsonl, line 2: not a whole JSON object"):
        read_records(path)
    found = read_records(path, skip_corrupt=True)
    assert (len(found), found.skipped) == (1, 1)
    # The next writer is not harmed by the torn line.
    append_record(path, record(steps=9) | {"steps": 9})
    found = read_records(path, skip_corrupt=True)
    assert [r["steps"] for r in found] == [1, 9]
    assert found.skipped == 1


def test_lines_that_are_no_records_are_faults(tmp_path):
    path = tmp_path / "r.jsonl"
    for text, fault in (("[1]", "not list"), ('{"kind": "train"}', "has no 'schema'")):
        path.write_text(text + "\n")
        with pytest.raises(DataError, match=fault):
            read_records(path)
    path.write_text(json.dumps({**record(), "schema": 99}) + "\n")
    with pytest.raises(DataError, match="schema 99"):
        read_records(path, skip_corrupt=True)
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_a_refusing_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    append_record(path, record())
    before = path.read_bytes()
    real = __import__("os").write
    monkeypatch.setattr("hybridtf.bench.records.os.write", lambda handle, data: real(handle, data[:40]))
    with pytest.raises(DataError, match="could not be written"):
        append_record(path, record())
    assert path.read_bytes() == before


def _write_many(path, n):
    for _ in range(n):
        append_record(path, record(text="x" * 5000))


def test_lines_of_two_processes_do_not_mix(tmp_path):
    path = tmp_path / "r.jsonl"
    writers = [multiprocessing.get_context("fork").Process(target=_write_many, args=(path, 15)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_records(path)) == 30


def test_select_takes_kind_and_fields():
    records = [record(a=1), record(a=2), make_record("quality", WHO, {"a": 1})]
    assert select(records, "train", a=1) == records[:1]


# -- which recipe ------------------------------------------------------------------------------------------------------


def test_the_hash_covers_what_is_built_and_nothing_else():
    base = Subject.from_recipe(recipe("a"), "x")
    titled = Subject.from_recipe(recipe("a", meta={"title": "Other"}), "y", seed=4)
    assert base.recipe_hash == titled.recipe_hash
    assert base.recipe_hash != Subject.from_recipe(recipe("a a"), "x").recipe_hash
    # Defaults written out, and another seed, are the same recipe; another number of steps is not.
    trained = [recipe("a", train=t) for t in (TRAIN, {**TRAIN, "lr": 1e-3, "seed": 5}, {**TRAIN, "steps": 7})]
    hashes = [Subject.from_recipe(r, "x").recipe_hash for r in trained]
    assert hashes[0] == hashes[1] != hashes[2]
    assert recipe_hash({"model": {"b": 1, "a": 2}}) == recipe_hash({"model": {"a": 2, "b": 1}, "task": None})


def test_identity_has_kernels_by_op_and_phase():
    one = subject("a m")
    found = one.identity(one.build())
    assert set(found.kernels) == {"attention", "ssd", "short_conv"}
    assert set(found.kernels["ssd"]) == {"train", "prefill", "decode"}
    assert found.pattern == "a m"
