"""``train``, ``eval``, ``generate``: a run from its recipe to its text."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtf.bench import read_records
from hybridtf.cli.generate import _cut, _held
from hybridtf.tasks.tokenization import ByteTokenizer
from hybridtf.train import RunFolder, load_run
from tests.cli.helpers import TRAIN, as_json, environment, ok, process, refused, run, write_recipe

# -- train -------------------------------------------------------------------------------------------------------------


def test_train_then_resume_further(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = ok("train", recipe, "-o", out, "--set", "train.eval_tokens=64", "--seed", 3)
    assert result.stdout.startswith(f"{out}: 4 steps, ")
    assert re.search(r", [\d,]+ scored tokens, \d+ s of training, \d+ s of evaluation; held out: bits_per", result.stdout)
    assert "step 4/4" in result.stderr  # plain lines where there is no terminal
    assert load_run(out).recipe.train.seed == 3
    assert "holds a run already" in refused("train", recipe, "-o", out)
    ok("train", recipe, "-o", out, "--resume", "--seed", 3, "--set", "train.steps=6")
    assert load_run(out).step == 6
    assert ok("train", "-o", out, "--resume").stdout.startswith(f"{out}: 6 steps, ")


def test_resume_further_with_the_recipe_of_the_run(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert ok("train", recipe, "-o", out, "--set", "train.steps=1").stdout.startswith(f"{out}: 1 step, ")
    Path(recipe).unlink()
    ok("train", "-o", out, "--resume", "--set", "train.steps=3")
    assert (load_run(out).step, load_run(out).recipe.train.steps) == (3, 3)
    error = refused("train", "-o", out, "--resume", "--set", "train.stps=3")
    assert "train.stps: unknown option. Did you mean 'steps'?" in error
    assert "has no checkpoint" in refused("train", "-o", tmp_path / "none", "--resume", "--seed", 1)


def test_train_from_a_checkpoint(recipe: str, trained: Path, tmp_path: Path) -> None:
    ok("train", recipe, "-o", tmp_path / "run", "--from", trained, "--set", "train.lr=1e-30", "--set", "train.steps=1")
    before, after = load_run(trained).model, load_run(tmp_path / "run").model
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        assert a.equal(b), name
    assert "no such folder. Did you mean" in refused("train", recipe, "-o", tmp_path / "b", "--from", tmp_path / "rum")


def test_ctrl_c_saves_and_says_what(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hybridtf", "train", recipe, "-o", str(out), "--set", "train.steps=100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as started:
        assert started.stderr is not None
        assert started.stderr.readline().startswith("step 2/100000")
        started.send_signal(signal.SIGINT)
        rest = started.stderr.read()
        assert started.wait(timeout=60) == 130
    latest = RunFolder(out).latest()
    assert latest is not None
    assert "Traceback" not in rest
    assert rest.splitlines()[-1].startswith(f"hybridtf: interrupted after step {int(latest.name[5:])}; saved {latest}")


def test_a_run_that_diverges_is_exit_code_one(recipe: str, tmp_path: Path) -> None:
    result = run("train", recipe, "-o", tmp_path / "run", "--set", "train.lr=1e30")
    assert result.exit_code == 1
    assert "is not finite" in result.stderr.splitlines()[-1]
    assert str(tmp_path / "run" / "checkpoints") in result.stderr


def test_a_full_disk_leaves_the_old_checkpoint(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ok("train", recipe, "-o", out)
    before = sorted(path.name for path in (out / "checkpoints").iterdir())

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = process("train", recipe, "-o", out, "--resume", "--set", "train.steps=8", preexec_fn=little_room)
    errors = [line for line in done.stderr.splitlines() if line.startswith("hybridtf:")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert "could not be written" in errors[0]
    assert "Traceback" not in done.stderr
    assert load_run(out).step == 4
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before


def test_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = write_recipe(tmp_path, "bad", (str(tmp_path / "texts"), str(tmp_path / "empty")))
    error = refused("train", file, "-o", tmp_path / "run")
    assert str(tmp_path / "empty") in error


def test_devices(recipe: str, tmp_path: Path) -> None:
    assert "is no device; allowed are cpu, cuda and cuda:N" in refused("train", recipe, "-o", tmp_path, "--device", "cpuu")
    assert "there are " in refused("train", recipe, "-o", tmp_path, "--device", "cuda:99")
    assert "allowed are cpu, cuda and cuda:N" in refused("train", recipe, "-o", tmp_path, "--device", "meta")


def test_a_recipe_without_what_training_needs(tmp_path: Path) -> None:
    error = refused("train", write_recipe(tmp_path, "bare", (TRAIN, "")), "-o", tmp_path / "run")
    assert error.endswith("train: the recipe has no section [train]; write one, or give --set train.steps=1000")


def test_a_file_in_the_place_of_the_run(recipe: str) -> None:
    for out in (recipe, f"{recipe}/run"):
        assert refused("train", recipe, "-o", out) == f"{recipe}: is a file; give a folder"


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_gives_a_record_and_a_table(trained: Path, tmp_path: Path) -> None:
    record = as_json("eval", trained, "-o", tmp_path / "records.jsonl")
    assert record == read_records(tmp_path / "records.jsonl")[0]
    assert (record["kind"], record["metric"]) == ("quality", "bits_per_byte")
    result = ok("eval", trained)
    assert f"{record['value']:.4f}" in result.stdout
    for name, value in record["baselines"].items():
        assert f"{value:.4f}" in next(line for line in result.stdout.splitlines() if line.startswith(name))


def test_eval_at_another_length_and_step(trained: Path) -> None:
    record = as_json("eval", trained, "--seq-len", 8, "--max-tokens", 40, "--step", 4)
    assert (record["seq_len"], record["n_tokens"] <= 40) == (8, True)
    assert "has no checkpoint of step 3. Steps: " in refused("eval", trained, "--step", 3)


def test_a_corrupt_checkpoint(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ok("train", recipe, "-o", out)
    weights = RunFolder(out).checkpoint() / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for command in (
        ["eval", out],
        ["generate", out],
        ["bench", "extrapolation", out],
        ["train", "-o", out, "--resume"],
    ):
        assert str(weights) in refused(*command)


def test_what_is_no_run(tmp_path: Path) -> None:
    assert "demo/hybrid: is a recipe, and a run is needed; train it first: hybridtf train" in refused("eval", "demo/hybrid")
    assert "is no run, checkpoint or model folder" in refused("eval", tmp_path)
    assert "no such folder" in refused("generate", tmp_path / "none")


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_streams_what_json_says(trained: Path) -> None:
    options = ["generate", trained, "--prompt", "the état", "-n", 30, "--seed", 5, "--top-k", 40, "--top-p", 0.9]
    found = as_json(*options)
    assert ok(*options).stdout == found["text"] + "\n"
    assert (found["prompt"], found["ended_by"], len(found["tokens"])) == ("the état", "length", 30)
    assert bytes(found["tokens"]).decode("utf-8", "replace") == found["text"]
    assert as_json(*options[:-6], "--temperature", 0) == as_json(*options[:-6], "--temperature", 0)


def test_the_prompt_from_a_file_and_from_a_pipe(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the people")
    wanted = ok("generate", trained, "-n", 12, "--prompt", "the people").stdout
    assert ok("generate", trained, "-n", 12, "--prompt-file", tmp_path / "prompt.txt").stdout == wanted
    assert ok("generate", trained, "-n", 12, stdin="the people").stdout == wanted
    assert ok("generate", trained, "-n", 12).stdout == ok("generate", trained, "-n", 12, "--prompt", "").stdout


def test_stop_texts_are_not_shown(trained: Path) -> None:
    whole = as_json("generate", trained, "-n", 40)["text"]
    stop = whole[10:13]
    cut = whole.index(stop)
    found = as_json("generate", trained, "-n", 40, "--stop", stop)
    assert (found["text"], found["ended_by"]) == (whole[:cut], "stop")
    assert ok("generate", trained, "-n", 40, "--stop", stop).stdout == whole[:cut] + "\n"
    assert ok("generate", trained, "-n", 40, "--stop", "never drawn ☃").stdout == whole + "\n"


def test_a_possible_beginning_of_a_stop_is_held_back() -> None:
    assert [_held(text, ("END", "NO")) for text in ("", "a", "aE", "aEN", "N", "EN N")] == [0, 0, 1, 2, 1, 1]
    assert [_cut(text, ("END", "NO")) for text in ("aEN", "aEND", "xNOEND", "")] == [None, 1, 1, None]


def test_a_prompt_that_is_no_text(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    assert refused("generate", trained, "--prompt-file", tmp_path / "bytes") == "the prompt is not UTF-8 text: byte 2 is 0xff"
    assert "cannot be read" in refused("generate", trained, "--prompt-file", tmp_path / "none")
    assert "give --prompt or --prompt-file, not both" in refused("generate", trained, "--prompt", "a", "--prompt-file", "b")


def test_options_that_contradict(trained: Path) -> None:
    assert refused("generate", trained, "--top-k", 3, "--temperature", 0) == "top_k and top_p need a temperature above 0"
    assert refused("generate", trained, "--top-p", 0) == "top_p: input should be greater than 0, got 0.0"


def test_the_cuts_reach_the_draws(trained: Path) -> None:
    likeliest = as_json("generate", trained, "-n", 12, "--temperature", 0)
    assert as_json("generate", trained, "-n", 12, "--min-p", 1)["tokens"] == likeliest["tokens"]
    other = as_json("generate", trained, "-n", 12, "--temperature", 0, "--repetition-penalty", 1e9)["tokens"]
    assert len(set(other)) == 12  # no token comes twice
    assert other != likeliest["tokens"]


def test_beams(trained: Path) -> None:
    greedy = as_json("generate", trained, "-n", 6, "--temperature", 0)
    one = as_json("generate", trained, "-n", 6, "--beams", 1)
    assert (one["tokens"], one["score"]) == (greedy["tokens"], pytest.approx(greedy["log_prob"] / 6))
    wide = as_json("generate", trained, "-n", 6, "--beams", 5, "--length-penalty", 0)
    assert wide["score"] == wide["log_prob"] >= greedy["log_prob"]
    assert ok("generate", trained, "-n", 6, "--beams", 5, "--length-penalty", 0).stdout == wide["text"] + "\n"


def test_a_draft_changes_the_time_alone(trained: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "small", ("n_layers = 4", "n_layers = 2"))
    ok("train", recipe, "-o", tmp_path / "small", "--set", "train.steps=1")
    options = ["generate", trained, "-n", 20, "--temperature", 0, "--prompt", "the people"]
    plain = as_json(*options)
    drafted = as_json(*options, "--draft", tmp_path / "small", "--n-draft", 3)
    assert drafted["tokens"] == plain["tokens"]
    assert 0 <= drafted["accepted"] <= drafted["drafted"] <= 3 * drafted["rounds"]
    assert drafted["accepted"] + drafted["rounds"] + 1 == 20
    own = as_json(*options, "--draft", trained)
    assert own["accepted"] == own["drafted"]


def test_ways_to_generate_exclude_each_other(trained: Path) -> None:
    def error(*options: object) -> str:
        return refused("generate", trained, *options)

    assert "--beams and --draft exclude each other" in error("--beams", 2, "--draft", trained)
    assert "--beams and --compile exclude each other" in error("--beams", 2, "--compile")
    assert "--draft and --compile exclude each other" in error("--draft", trained, "--compile")
    for name, value in (("--temperature", 0.5), ("--top-k", 3), ("--min-p", 0.1), ("--repetition-penalty", 1.1)):
        assert f"beams are searched, not drawn: take {name} or --beams away" in error("--beams", 2, name, value)
    assert "--length-penalty: has no meaning without --beams" in error("--length-penalty", 1)
    assert "--n-draft: has no meaning without --draft" in error("--n-draft", 2)
    assert error("--min-p", 0.1, "--temperature", 0) == "min_p needs a temperature above 0"
    assert "repetition_penalty: input should be greater than 0" in error("--repetition-penalty", 0)


def test_a_draft_with_other_tokens_is_refused(trained: Path, tmp_path: Path) -> None:
    # Another tokenizer of the same size: its fingerprint tells them apart.
    recipe = write_recipe(tmp_path, "other")
    ok("train", recipe, "-o", tmp_path / "other", "--set", "train.steps=1")
    with pytest.MonkeyPatch.context() as patch:
        fingerprints = iter(["a", "b"])
        patch.setattr(ByteTokenizer, "fingerprint", property(lambda self: next(fingerprints)), raising=False)
        assert "its tokenizer differs from that of" in refused("generate", trained, "--draft", tmp_path / "other")


@pytest.mark.slow
def test_a_compiled_decode_step(trained: Path) -> None:
    options = ["generate", trained, "-n", 8, "--seed", 3]
    assert as_json(*options, "--compile")["tokens"] == as_json(*options)["tokens"]


def test_a_prompt_longer_than_a_learned_position_table(tmp_path: Path) -> None:
    stem = 'stem = { type = "token_embedding", position = { type = "learned" } }'
    recipe = write_recipe(tmp_path, "learned", ("max_seq_len = 32", f"max_seq_len = 32\n{stem}"))
    ok("train", recipe, "-o", tmp_path / "run")
    assert ok("generate", tmp_path / "run", "--prompt", "short", "-n", 3).stdout
    error = refused("generate", tmp_path / "run", "--prompt", "x" * 40)
    assert "32" in error


def test_text_survives_a_terminal_without_utf8(trained: Path) -> None:
    command = [sys.executable, "-m", "hybridtf", "generate", str(trained), "-n", "20", "--seed", "5"]
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii")


def test_colour_only_where_it_is_wanted(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in ok("show", recipe).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[36m" in ok("show", recipe).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in ok("show", recipe).stdout


# -- averages and statistics -------------------------------------------------------------------------------------------


def test_averages_and_statistics_of_a_run(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["optimizer=muon", "ema_decay=0.5", "eval_ema=true", "eval_tokens=64", "stats_every=2"]
    result = ok("train", recipe, "-o", out, *(word for option in options for word in ("--set", f"train.{option}")))
    assert re.search(r"held out: bits_per_byte [\d.]+, .*; of the average: bits_per_byte [\d.]+", result.stdout)
    table = ok("stats", out).stdout
    assert "Layers at step 4" in table
    assert all(name in table for name in ("stem", "0.m", "3.a", "final_norm", "update_ratio", "act_kurtosis"))
    line = as_json("stats", out, "--step", 2)
    assert (line["event"], line["step"]) == ("stats", 2)
    assert "has no statistics of step 3. Steps: 2, 4" in refused("stats", out, "--step", 3)
    scores = {which: as_json("eval", out, "--max-tokens", 64, "--weights", which) for which in ("model", "ema")}
    assert scores["model"]["value"] != scores["ema"]["value"]
    assert scores["ema"]["recipe"] == f"{out.as_posix()} (ema)"
    texts = {which: ok("generate", out, "-n", 8, "--prompt", "a", "--weights", which).stdout for which in ("model", "ema")}
    assert len(texts) == 2
    assert "--weights emaa: Did you mean 'ema'?" in refused("eval", out, "--weights", "emaa")


def test_a_run_without_averages_and_statistics(trained: Path, tmp_path: Path) -> None:
    assert "train.ema_decay" in refused("eval", trained, "--weights", "ema")
    assert "train with --set train.stats_every=N" in refused("stats", trained)
    assert "log.jsonl: no such file" in refused("stats", tmp_path)
