import io
import json

import pytest
from rich.console import Console

from hybridtf.core import CheckpointError
from hybridtf.train.log import Log, read_log
from hybridtf.train.progress import Reporter, count, counted, duration
from tests.train.runs import recipe, run


def shown(style, *, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, color_system=None)
    with Reporter(20, style, console) as reporter:
        reporter.step(10, 61.0)
        reporter.logged(10, {"loss": 2.5, "bits_per_byte": 3.25, "tokens_per_second": 12345.0, "lr": 1e-3}, 61.0)
        reporter.say("saved [here]")
    return text.getvalue()


def test_plain_lines_without_a_terminal():
    assert shown("auto", terminal=False).splitlines() == [
        "step 10/20  loss 2.5000  3.250 bits/byte  12.3k tokens/s  lr 1.00e-03  eta 1:01", "saved [here]",
    ]


def test_a_bar_on_a_terminal():
    text = shown("auto", terminal=True)
    for words in ("10/20", "loss 2.5000", "12.3k tokens/s", "eta 1:01", "saved [here]"):
        assert words in text


def test_none_is_silent():
    assert shown("none", terminal=True) == shown("none", terminal=False) == ""


def test_a_run_writes_lines_to_stderr(tmp_path, capsys):
    run(recipe(tmp_path, steps=2, log_every=1, eval_tokens=30), tmp_path / "out", progress="lines")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("step 1/2  loss ")
    assert "step 2/2  evaluating on up to 30 held-out tokens\nstep 2/2  held out (" in err
    run(recipe(tmp_path, steps=3, log_every=1, eval_tokens="all"), tmp_path / "out", progress="lines", resume=True)
    err = capsys.readouterr().err
    assert err.startswith("resuming from step 2\nstep 3/3  loss ")
    assert "step 3/3  evaluating on all held-out tokens\n" in err


def evaluation(style, *, terminal, pause=0.0):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=140, color_system=None)
    with Reporter(20, style, console, pause=pause) as reporter:
        reporter.resuming(20)
        reporter.evaluating(20, "up to 5,000")
        reporter.scored(1)
        reporter.scored(2345)
    return text.getvalue()


def test_an_evaluation_shows_how_far_it_is():
    begun = ["resuming from step 20", "step 20/20  evaluating on up to 5,000 held-out tokens"]
    assert evaluation("auto", terminal=False).splitlines() == [
        *begun, "step 20/20  evaluating: 1 token scored", "step 20/20  evaluating: 2,345 tokens scored",
    ]
    assert evaluation("auto", terminal=False, pause=60.0).splitlines() == begun
    bar = evaluation("auto", terminal=True)
    assert all(words in bar for words in (*begun, "evaluating: 2.35k tokens scored", "20/20"))
    assert evaluation("none", terminal=True) == ""


def test_numbers_for_people():
    assert [duration(s) for s in (0, 0.2, 59, 61, 3600, 3725)] == ["0:00", "0:01", "0:59", "1:01", "1:00:00", "1:02:05"]
    assert [counted(n, "step") for n in (0, 1, 2497)] == ["0 steps", "1 step", "2,497 steps"]
    assert [count(n) for n in (0, 950, 1234, 5.6e6, 7e9)] == ["0", "950", "1.23k", "5.6M", "7G"]


def test_a_log_is_cut_to_a_step(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        log.write("train", step, {"loss": step / 2})
    log.write("eval", 2, {})
    with log.path.open("a") as handle:
        handle.write('{"event": "tra')
    again = Log(log.path, after=2)
    assert [(x["event"], x["step"]) for x in read_log(log.path)] == [("train", 1), ("train", 2), ("eval", 2)]
    assert again.found.keys() == {"train", "eval"}
    assert all(json.loads(line) for line in log.path.read_text().splitlines())
    assert Log(log.path).found == {}
    assert log.path.read_text() == ""


def test_a_line_of_the_step_resumed_from_is_replaced_by_the_new_one(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.write("eval", 1, {"loss": 3.0})
    log.write("eval", 2, {"loss": 2.0})
    before = log.path.read_text()
    again = Log(log.path, after=2)
    assert log.path.read_text() == before
    again.write("eval", 2, {"loss": 1.0})
    again.write("train", 3, {})
    assert [(x["event"], x["step"], x.get("loss")) for x in read_log(log.path)] == [
        ("eval", 1, 3.0), ("eval", 2, 1.0), ("train", 3, None),
    ]


def test_numbers_that_are_not_finite_are_not_written(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        log.write("train", 1, {"loss": float("nan")})
    assert log.path.read_text() == ""


def test_a_log_that_cannot_be_written(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(CheckpointError, match=r"log\.jsonl: could not be written \(Is a directory\)"):
        log.write("train", 1, {})
