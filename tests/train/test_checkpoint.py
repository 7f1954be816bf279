import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridtf.core import CheckpointError
from hybridtf.train import RunFolder, load_model, load_run, read_log, save_model
from hybridtf.train.checkpoint import TrainerState
from tests.train.runs import assert_equal_weights, build, recipe, run

ROOT = Path(__file__).parents[2]


def saved(tmp_path):
    made = recipe(tmp_path)
    model = build(made)
    save_model(model, made, tmp_path / "model")
    return made, model, tmp_path / "model"


# -- model folders -----------------------------------------------------------------------------------------------------


def test_a_model_folder_gives_the_model_back(tmp_path):
    made, model, place = saved(tmp_path)
    assert sorted(p.name for p in place.iterdir()) == ["recipe.toml", "weights.safetensors"]
    found = load_run(place)
    assert_equal_weights(found.model, model)
    assert found.recipe == made
    assert (found.step, found.path, found.model.training) == (None, place, False)
    assert_equal_weights(load_model(place), model)
    ids = torch.randint(0, 257, (2, 9))
    assert torch.equal(found.model(ids).logits, model.eval()(ids).logits)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    _, _, place = saved(tmp_path)
    names = set(load_file(place / "weights.safetensors"))
    assert not {name for name in names if name.startswith("head.")}
    model = load_model(place)
    before = model(torch.zeros(1, 1, dtype=torch.int64)).logits
    with torch.no_grad():
        model.stem.embedding.weight.mul_(0)
    assert before.any()
    assert not model(torch.zeros(1, 1, dtype=torch.int64)).logits.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(tmp_path, dtype):
    made = recipe(tmp_path)
    model = build(made, dtype)
    save_model(model, made, tmp_path / "model")
    assert {p.dtype for p in load_model(tmp_path / "model").parameters()} == {dtype}
    again = load_model(tmp_path / "model", dtype=torch.float32)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b.float())


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    made, model, place = saved(tmp_path)
    with torch.no_grad():
        model.final_norm.weight.fill_(3.0)
    save_model(model, made, place)
    assert_equal_weights(load_model(place), model)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="is there already and is no model folder"):
        save_model(model, made, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def edit(old, new):
    def breaking(place):
        file = place / "recipe.toml"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return breaking


def cut(place):
    file = place / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(("breaking", "words"), [
    (lambda p: (p / "weights.safetensors").write_bytes(b"garbage"), "not a readable safetensors file"),
    (cut, "not a readable"),
    (lambda p: (p / "weights.safetensors").write_bytes(b""), "not a readable"),
    (lambda p: (p / "weights.safetensors").unlink(), "no such weights file"),
    (lambda p: (p / "recipe.toml").unlink(), "recipe.toml: no such file"),
    (lambda p: (p / "recipe.toml").write_text("[model"), "is no TOML"),
    (lambda p: (p / "recipe.toml").write_bytes(b"\xff\xfe"), "not UTF-8"),
    (lambda p: (p / "recipe.toml").write_text('[model]\ntype = "nothing"'), "no model named 'nothing'"),
    (edit("d_model = 8", "d_model = 12"), "shape"),
    (edit("n_heads = 2", "n_heads = 3"), "n_heads"),
    (lambda p: [f.unlink() for f in p.iterdir()], "is no run, checkpoint or model folder"),
    (shutil.rmtree, "no such folder"),
])
def test_what_is_missing_or_corrupt_is_one_clear_line(tmp_path, breaking, words):
    _, _, place = saved(tmp_path)
    breaking(place)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_run(place)
    assert "\n" not in str(caught.value)
    assert str(place) in str(caught.value)


def test_a_path_that_is_nearly_right_is_told(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"Did you mean '.*/model'"):
        load_run(tmp_path / "modle")
    with pytest.raises(CheckpointError, match="is no run folder, so it has no step 3"):
        load_run(tmp_path / "model", step=3)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_folder_and_its_checkpoints(tmp_path):
    result = run(recipe(tmp_path, save_every=2, keep_checkpoints=3), tmp_path / "out")
    newest = load_run(tmp_path / "out")
    assert (newest.step, newest.path) == (6, result.checkpoint)
    assert_equal_weights(newest.model, result.model)
    assert load_run(tmp_path / "out", step=2).step == 2
    assert load_run(tmp_path / "out" / "checkpoints" / "step-00000004").step == 4
    assert newest.recipe.train == result.recipe.train
    assert newest.recipe.meta.resolved.seed == 0
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 5. Steps: 2, 4, 6"):
        load_run(tmp_path / "out", step=5)
    names = {p.name for p in result.checkpoint.iterdir()}
    assert names == {"weights.safetensors", "trainer.safetensors", "trainer.json", "recipe.toml"}
    assert {oct(p.stat().st_mode & 0o777) for p in result.checkpoint.iterdir()} == {"0o644"}
    assert (tmp_path / "out" / "checkpoints" / "latest").read_text() == "step-00000006\n"


def state():
    return TrainerState({"format": 1}, {"random.cpu": torch.get_rng_state()})


@pytest.fixture
def folder(tmp_path):
    made = recipe(tmp_path)
    out = RunFolder(tmp_path / "out")
    return out, lambda step: out.save(step, build(made), made, state())


def names(out):
    return sorted(p.name for p in out.checkpoints.iterdir() if p.is_dir())


def test_pruning_keeps_the_newest_up_to_the_step(folder):
    out, save = folder
    for step in (1, 2, 3, 9):
        save(step)
    out.prune(2, newest=3)
    assert names(out) == ["step-00000002", "step-00000003", "step-00000009"]
    out.prune(1, newest=9)
    assert names(out) == ["step-00000009"]


def test_a_missing_or_torn_pointer_falls_back_to_the_newest(folder):
    out, save = folder
    save(1), save(2)
    (out.checkpoints / "latest").write_text("step-00000001\n")
    assert out.latest().name == "step-00000001"
    for wrong in ("", "step-000", "step-00000007", "../../etc"):
        (out.checkpoints / "latest").write_text(wrong)
        assert out.latest().name == "step-00000002"
    (out.checkpoints / "latest").unlink()
    assert out.latest().name == "step-00000002"


@pytest.mark.parametrize("after_listing", [True, False])
def test_a_reader_follows_a_run_that_goes_on(folder, monkeypatch, after_listing):
    """Between the pointer and the files that it names, the run writes the next checkpoint and removes this one."""
    out, save = folder
    save(1)
    listing, moved = out._folders, []

    def move_on():
        if not moved:
            moved.append(save(2))
            out.prune(1, newest=2)

    def folders():
        found = listing() if after_listing else None
        monkeypatch.setattr(out, "_folders", listing)
        move_on()
        return found if after_listing else listing()

    monkeypatch.setattr(out, "_folders", folders)
    assert out.latest().name == "step-00000002"


@pytest.mark.parametrize("name", ["trainer.json", "trainer.safetensors"])
def test_a_model_is_loaded_without_the_trainers_files_but_not_resumed(tmp_path, name):
    result = run(recipe(tmp_path, save_every=2), tmp_path / "out")
    (result.checkpoint / name).unlink()
    log = (tmp_path / "out" / "log.jsonl").read_bytes()
    found = load_run(tmp_path / "out")
    assert (found.step, found.path) == (6, result.checkpoint)
    assert_equal_weights(found.model, result.model)
    started = run(recipe(tmp_path, lr=1e-30, steps=1), tmp_path / "new", init_from=tmp_path / "out")
    torch.testing.assert_close(started.model.state_dict(), result.model.state_dict())
    with pytest.raises(CheckpointError, match=f"step-00000006/{name}: no such file"):
        run(None, tmp_path / "out", resume=True)
    with pytest.raises(CheckpointError, match="holds a run already"):
        run(recipe(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("name", ["weights.safetensors", "recipe.toml"])
def test_an_incomplete_newest_checkpoint_is_not_replaced_by_an_older_one(tmp_path, name):
    result = run(recipe(tmp_path, save_every=4), tmp_path / "out")
    (result.checkpoint / name).unlink()
    words = rf"step-00000006/{name}: no such file.*steps whose model is whole: 4$"
    for step in (None, 6):
        with pytest.raises(CheckpointError, match=words):
            load_run(tmp_path / "out", step=step)
    with pytest.raises(CheckpointError, match=words):
        run(None, tmp_path / "out", resume=True)
    assert load_run(tmp_path / "out", step=4).step == 4
    shutil.rmtree(result.checkpoint)
    assert load_run(tmp_path / "out").step == 4


def test_equal_models_are_equal_files(folder):
    _, save = folder
    files = [(save(step) / "weights.safetensors").read_bytes() for step in range(1, 9)]
    assert len(set(files)) == 1
    assert b'"__metadata__":{"format":"pt"}' in files[0]


def test_a_checkpoint_killed_while_being_replaced_is_found(folder):
    out, save = folder
    save(1)
    os.replace(out.checkpoints / "step-00000001", out.checkpoints / ".step-00000001.old")
    assert out.latest().name == ".step-00000001.old"
    assert load_run(out.path).step == 1
    out.clean()
    assert load_run(out.path).step == 1
    save(1)
    assert out.latest().name == "step-00000001"
    out.clean()
    assert names(out) == ["step-00000001"]


def test_leftovers_of_a_kill_are_cleaned_and_nothing_else(folder):
    out, save = folder
    save(1)
    for leftover in (".step-00000002.abc", ".step-00000003.gone"):
        (out.checkpoints / leftover).mkdir()
    (out.checkpoints / ".latest.xyz").write_text("")
    (out.checkpoints / ".notes").write_text("mine")
    out.clean()
    assert sorted(p.name for p in out.checkpoints.iterdir()) == [".notes", "latest", "step-00000001"]


# -- the disk and the axe ----------------------------------------------------------------------------------------------


FULL_DISK = """
import resource, sys
from pathlib import Path
from hybridtf.core import CheckpointError
from tests.train.runs import build, recipe, run
from hybridtf.train import RunFolder, save_model
from hybridtf.train.checkpoint import TrainerState

base = Path(sys.argv[1])
made, state = recipe(base), TrainerState({"format": 1}, {})
out = RunFolder(base / "out")
out.save(1, build(made), made, state)
save_model(build(made), made, base / "model")

def full(report=None):
    if report is None or report.step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

def train():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run(recipe(base, save_every=2), base / "run", on_step=full)

full()
other = build(made, seed=1)
for save in (
    lambda: out.save(2, other, made, state), lambda: out.save(1, other, made, state),
    lambda: save_model(other, made, base / "model"), train,
):
    try:
        save()
    except CheckpointError as error:
        print(error)
"""


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """In a process whose files may not grow past a limit, as on a disk that is full after some kilobytes."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=120,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all("could not be written (" in line and "what was there is unchanged" in line for line in lines)
    assert "step-00000002" in lines[0]
    assert lines[3].endswith(f"The run can be resumed from {tmp_path}/run/checkpoints/step-00000002")
    first = build(recipe(tmp_path))
    assert_equal_weights(load_run(tmp_path / "out").model, first)
    assert_equal_weights(load_run(tmp_path / "model").model, first)
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["latest", "step-00000001"]
    assert run(None, tmp_path / "run", resume=True).steps == 6


@pytest.mark.slow
def test_a_run_killed_at_any_moment_can_be_loaded_and_resumed(tmp_path):
    """Saves after every step, so that most kills hit a save; then the whole run equals one that nobody killed."""
    made = recipe(tmp_path, steps=400, save_every=1, keep_checkpoints=1)
    code = f"""
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.train.runs import recipe, run
base = Path({str(tmp_path)!r})
made = recipe(base, steps=400, save_every=1, keep_checkpoints=1)
run(made if not (base / "out" / "checkpoints" / "latest").exists() else None, base / "out",
    resume=(base / "out" / "checkpoints" / "latest").exists())
"""
    delays = [0.0, 0.011, 0.023, 0.037, 0.041, 0.058, 0.3]
    last = -1
    for delay in delays:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        started = time.monotonic()
        while time.monotonic() - started < 60:
            newest = RunFolder(tmp_path / "out").latest()
            if newest is not None and int(newest.name.rpartition("-")[2].removesuffix(".old")) > last + 2:
                break
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        step = load_run(tmp_path / "out").step
        assert step > last
        last = step
    assert last < 400
    run(None, tmp_path / "out", resume=True)
    whole = run(made, tmp_path / "whole")
    assert_equal_weights(load_run(tmp_path / "out").model, whole.model)
    losses = [[(x["step"], x["loss"]) for x in read_log(tmp_path / name / "log.jsonl")] for name in ("out", "whole")]
    assert losses[0] == losses[1]
    assert not [p for p in (tmp_path / "out" / "checkpoints").iterdir() if p.name.startswith(".")]
