"""``bench``, ``compare`` and ``report``: measurements, their records, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtf.bench import read_records, select
from hybridtf.cli.sources import need_folder, parse_size
from hybridtf.core import ConfigError
from tests.cli.helpers import TRAIN, as_json, ok, refused, run, write_recipe

QUICK = ("--length", 32, "--batch-size", 1)
ROWS = """
[model]
type = "language_model"
vocab_size = 8
d_model = 8
pattern = "m"

[model.blocks.m]
mixer = { type = "mamba2", d_state = 4, head_dim = 4 }

[task]
type = "induction_heads"
vocab_size = 8
train = [{ length = 16, n_rows = 50 }]
test = [{ length = 16, n_rows = 4 }]

[train]
steps = 2
seq_len = 16
batch_size = 2
"""


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the HTML page, which takes seconds, where it is not what the test is about."""
    monkeypatch.setattr("hybridtf.cli.compare._write_report", lambda records, path: None)


@pytest.fixture
def learnt_alone(monkeypatch: pytest.MonkeyPatch, no_page: None) -> None:
    """Leave out memory and speed too, where the test is about the training."""
    for name in ("memory", "speed"):
        monkeypatch.setattr(f"hybridtf.bench.comparison._Comparison.{name}", lambda self, arms: None)


# -- bench -------------------------------------------------------------------------------------------------------------


def test_speed_beside_another(recipe: str, trained: Path, tmp_path: Path) -> None:
    found = as_json(
        "bench", "speed", recipe, trained, "--against", "smoke/mamba2", *QUICK, "--repeats", 1, "--warmup", 0,
        "--phase", "train", "--phase", "decode", "-o", tmp_path / "r.jsonl",
    )  # fmt: skip
    assert found["records"] == read_records(tmp_path / "r.jsonl")
    names = ["smoke/mamba2", "tiny", trained.as_posix()]
    assert [(r["phase"], r["recipe"]) for r in found["records"]] == [(p, n) for p in ("train", "decode") for n in names]
    assert {r["ratio"]["against"] for r in found["records"]} == {"smoke/mamba2"}
    assert [row["recipe"] for row in found["table"]][::2] == names


def test_what_would_do_nothing_is_refused(recipe: str, trained: Path) -> None:
    assert f"{trained}: is a run, and --set changes recipes alone" in refused(
        "bench", "speed", trained, "--set", "model.d_model=8", *QUICK
    )
    assert "--set changes recipes alone" in refused("bench", "memory", recipe, trained, "--set", "train.steps=3", *QUICK)
    assert f"{recipe} is named twice" in refused("bench", "speed", recipe, "--against", recipe, *QUICK)
    assert f"{trained} is named twice" in refused("bench", "extrapolation", trained, trained)
    assert "--max-length does nothing here: it needs --limit or --fits" in refused(
        "bench", "memory", recipe, "--max-length", 64, *QUICK
    )
    assert "--timeout does nothing here: it needs --fits or --rest" in refused(
        "bench", "memory", recipe, "--timeout", 9, *QUICK
    )
    assert "--rest does nothing here" in refused("bench", "memory", recipe, "--rest", "--fits", *QUICK)
    assert "--length does nothing here" in refused("bench", "memory", recipe, "--fits", *QUICK)
    assert "--multiples does nothing here: --lengths says all of them" in refused(
        "bench", "extrapolation", trained, "--multiples", "1,2", "--lengths", "64"
    )
    for idle in (("--seeds", 3), ("--workers", 2), ("--smoke",)):
        assert "belong to a run; name a study" in refused("study", "list", *idle)


def test_files_of_one_name_are_called_by_their_paths(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twin = write_recipe(tmp_path / "other")
    found = as_json("bench", "speed", recipe, twin, *QUICK, "--repeats", 1, "--warmup", 0, "--phase", "prefill")
    assert [r["recipe"] for r in found["records"]] == [recipe, twin]


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "smoke/mamba2", "-o", "/proc/nope"), ("study", "all", "-o", "/proc/nope"),
        ("match", "smoke/mamba2", "--params", "1M", "-o", "/proc/nope"),
        ("train", "smoke/mamba2", "-o", "/proc/nope"),
        ("bench", "speed", "smoke/mamba2", "-o", "/proc/nope/r.jsonl"),
        ("bench", "memory", "smoke/mamba2", "-o", "/proc/nope/r.jsonl"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = ("bench.compare", "bench.speed.measure_speed", "bench.memory.measure_memory", "studies.run_study", "train.train")
    for work in works:
        monkeypatch.setattr(f"hybridtf.{work}", None)
    assert refused(*command).startswith("/proc/nope: cannot be written to (")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan smoke/mamba2 --length 99999999999999999M", "--length 99999999999999999M: at most 256M can be counted"),
        ("match smoke/mamba2 --state-bytes 1MiB --length 9999999999999999999", "at most 256M can be counted"),
        ("plan smoke/mamba2 --length 16 --batch-size 99999999999999999999", "batch_size must be from 1 to 65536"),
        ("compare smoke/mamba2 -o OUT --lr inf", "learning_rates must differ and be above 0, and finite"),
        ("compare smoke/mamba2 -o OUT --timeout nan", "timeout_s must be finite and above 0"),
    ],
)
def test_numbers_beyond_all_bounds(command: str, message: str, tmp_path: Path) -> None:
    assert message in refused(*command.replace("OUT", str(tmp_path)).split())


def test_looking_for_a_place_leaves_nothing(tmp_path: Path) -> None:
    need_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_kernels_of_an_op_beside_each_other(recipe: str, tmp_path: Path) -> None:
    found = as_json(
        "bench", "kernel", "ssd", "smoke/mamba2", *QUICK, "--repeats", 1, "--warmup", 0, "--phase", "prefill", "--threads", 1,
        "-o", tmp_path / "r.jsonl",
    )  # fmt: skip
    assert found["records"] == read_records(tmp_path / "r.jsonl")
    assert {"chunked", "reference"} <= {row["kernel"] for row in found["table"]}
    assert "no kernel named 'chunkd'. Did you mean 'chunked'?" in refused(
        "bench", "kernel", "ssd", "smoke/mamba2", "--kernel", "chunkd", *QUICK
    )


def test_memory_of_two_phases_and_the_longest_length(recipe: str, tmp_path: Path) -> None:
    found = as_json(
        "bench", "memory", recipe, *QUICK, "--phase", "train", "--phase", "decode", "--limit", "2MB", "--max-length", 33
    )
    train, decode = found["records"]
    assert (train["phase"], decode["phase"], train["length"]) == ("train", "decode", 32)
    assert train["longest"]["limit_bytes"] == 2_000_000
    assert train["peak"] > train["weights"] > 0
    assert "peak" in ok("bench", "memory", recipe, *QUICK).stdout


@pytest.mark.slow
def test_lengths_are_tried_in_child_processes(recipe: str) -> None:
    found = as_json("bench", "memory", recipe, "--fits", "--limit", "1GiB", "--max-length", 40, "--batch-size", 1)
    one = found["records"][0]
    assert (one["kind"], one["limit_bytes"], one["fits"], one["ended"]) == ("fits", 1 << 30, 40, "max_length")
    assert [p["outcome"] for p in one["probes"]] == ["ok", "ok"]
    assert found["table"][0]["fits"] == 40


def test_changes_reach_the_measurement(recipe: str) -> None:
    def params(*more: str) -> int:
        return as_json("bench", "memory", recipe, *QUICK, *more)["records"][0]["n_params"]

    assert params("--set", "model.n_layers=8") > params()


def test_autocast(recipe: str) -> None:
    def activations(dtype: str) -> int:
        return as_json("bench", "memory", recipe, *QUICK, "--dtype", dtype)["records"][0]["activations"]

    assert activations("bfloat16") != activations("float32")


def test_extrapolation_of_a_run(trained: Path, tmp_path: Path) -> None:
    found = as_json("bench", "extrapolation", trained, "--multiples", "1,2,4", "--max-documents", 2, "-o", tmp_path / "r.jsonl")
    record = found["records"][0]
    assert (record["trained_length"], record["multiples"], record["n_documents"]) == (32, [1, 2, 4], 2)
    assert all(record["bits_per_byte"])
    assert found["table"][0]["trained_length"] == 32
    assert "4x" in ok("bench", "extrapolation", trained, "--multiples", "1,4").stdout


def test_lengths_in_tokens_windows_and_time(trained: Path) -> None:
    given = ("--lengths", "40,1k", "--stride", 40, "--max-documents", 2, "--timeout", 0.001)
    found = as_json("bench", "extrapolation", trained, *given)
    assert [(e["length"], e["result"]) for e in found["records"][0]["by_length"]] == [(40, "timed_out"), (1024, "not_run")]
    assert [(row["trained_length"], row["ratio"]) for row in found["table"]] == [(32, "1.25x"), (32, "32x")]
    assert "must be tokens with commas between" in refused("bench", "extrapolation", trained, "--lengths", "1g")


def test_extrapolation_of_drawn_rows(tmp_path: Path) -> None:
    recipe = tmp_path / "rows.toml"
    recipe.write_text(ROWS)
    ok("train", recipe, "-o", tmp_path / "run")
    found = as_json("bench", "extrapolation", tmp_path / "run", "--lengths", "16,128", "--max-rows", 20)
    assert [row["ratio"] for row in found["table"]] == ["1x", "8x"]
    assert all(row["trained_length"] == 16 and row["n_units"] == 20 for row in found["table"])
    assert found["records"][0]["grid"]["lengths"] == [16, 128]
    shown = ok("bench", "extrapolation", tmp_path / "run", "--multiples", "1,2", "--max-rows", 4).stdout
    assert "only 'induction_heads' was measured" in " ".join(shown.split())


def test_extrapolation_needs_a_run() -> None:
    assert "is a recipe, and a run is needed" in refused("bench", "extrapolation", "demo/hybrid")
    assert "must be whole numbers with commas between" in refused("bench", "extrapolation", "x", "--multiples", "1,b")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("800MB", 800_000_000), ("8GiB", 8 << 30), ("1.5 kB", 1500), ("2m", 2_000_000), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--limit") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 XB", "0"])
def test_what_is_no_size(text: str, recipe: str) -> None:
    with pytest.raises(ConfigError, match="is no size; write 800MB, 8GB or 8GiB"):
        parse_size(text, "--limit")
    assert "is no size" in refused("bench", "memory", recipe, f"--limit={text}")


# -- compare -----------------------------------------------------------------------------------------------------------


def test_compare_ends_with_the_table_and_the_report(compared: tuple[list[object], Path]) -> None:
    _, folder = compared
    table, messages = (folder / "stdout").read_text(), (folder / "stderr").read_text()
    for word in ("tiny", "attention", "bigram", "tok/s", "16x", "move by half a window", "the state carried"):
        assert word in table
    assert messages.splitlines()[-1] == f"hybridtf: report: {folder / 'out' / 'report.html'}"
    assert "hybridtf: tiny, seed 0: training" in messages
    page = (folder / "out" / "report.html").read_text()
    assert "tiny" in page
    kinds = {r["kind"] for r in read_records(folder / "out" / "records.jsonl")}
    assert kinds == {"train", "model", "quality", "extrapolation", "memory", "speed"}


@pytest.mark.usefixtures("no_page")
def test_a_second_call_says_that_everything_is_there(compared: tuple[list[object], Path]) -> None:
    arguments, folder = compared
    records = (folder / "out" / "records.jsonl").read_bytes()
    result = ok(*arguments)
    file = folder / "out" / "records.jsonl"
    assert f"hybridtf: everything was in {file} already; nothing was measured again" in result.stderr
    assert result.stdout == (folder / "stdout").read_text()
    assert (folder / "out" / "records.jsonl").read_bytes() == records


@pytest.mark.usefixtures("learnt_alone")
def test_more_seeds_add_to_what_is_there(compared: tuple[list[object], Path]) -> None:
    arguments, folder = compared
    quick = ("--context", 32, "--repeats", 1, "--steps", 2, "--max-documents", 2)
    found = as_json(*arguments[:2], "-o", folder / "more", *quick, "--seeds", 2)
    assert [r["seed"] for r in select(found["records"], "quality")] == [0, 1]
    assert [r["steps"] for r in select(found["records"], "train")] == [2, 2]
    assert found["table"][0]["bits_per_byte_seeds"] == 2


@pytest.mark.usefixtures("learnt_alone")
@pytest.mark.parametrize("train", ["", TRAIN.replace("steps = 4", "tokens = 500"), TRAIN.replace("steps = 4\n", "")])
def test_steps_stand_for_what_the_recipe_says_or_leaves_out(train: str, tmp_path: Path) -> None:
    file = write_recipe(tmp_path, "other", (TRAIN, train))
    quick = ("--set", "train.seq_len=32", "--context", 32, "--repeats", 1, "--max-documents", 2, "--eval-tokens", 64)
    found = as_json("compare", file, "-o", tmp_path / "out", "--steps", 3, *quick)
    assert [r["steps"] for r in select(found["records"], "train")] == [3]


def test_what_compare_refuses_before_it_trains(recipe: str, tmp_path: Path) -> None:
    assert refused("compare", recipe, "-o", recipe) == f"{recipe}: is a file; give a folder"
    assert run("compare", recipe, "-o", recipe).stderr.count("\n") == 1, "more than the refusal"
    bare = write_recipe(tmp_path, "bare", (TRAIN, ""))
    error = refused("compare", bare, "-o", tmp_path / "out")
    assert error == f"{bare}: train: the recipe has no section [train]; write one, or give --steps 1000"
    # What only building tells, of the last recipe too.
    wrong = write_recipe(tmp_path, "wrong", ("n_heads = 4, n_kv", "n_heads = 10, n_kv"))
    assert refused("compare", recipe, wrong, "-o", tmp_path / "out").startswith(f"{wrong}: model.blocks.")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_page")
def test_a_comparison_in_which_a_run_diverges(recipe: str, tmp_path: Path) -> None:
    result = run("compare", recipe, "-o", tmp_path / "out", "--set", "train.lr=1e30", "--context", 32, "--repeats", 1)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("hybridtf: failed: tiny: NonFiniteError")
    assert "tiny" in result.stdout


@pytest.mark.usefixtures("no_page")
def test_a_comparison_that_was_interrupted_goes_on(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    arguments = ["compare", recipe, "-o", tmp_path / "out", "--context", 32, "--repeats", 1]
    with monkeypatch.context() as patch:
        patch.setattr("hybridtf.bench.comparison.measure_memory", interrupt)
        result = run(*arguments)
    file = tmp_path / "out" / "records.jsonl"
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == (
        f"hybridtf: interrupted; what was measured is in {file}, and the same command goes on from there"
    )
    before = read_records(file)
    assert select(before, "train")
    ok(*arguments)
    after = read_records(file)
    assert after[: len(before)] == before
    assert len(select(after, "train")) == 1


def test_recipes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    from hybridtf.cli.compare import _named

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    files = [write_recipe(tmp_path / "a"), write_recipe(tmp_path / "b")]
    assert list(_named(files, None)) == files
    assert refused("compare", files[0], files[0], "-o", tmp_path / "out").startswith(f"{files[0]} is named twice; copy it")


def test_tables_are_of_one_task_each() -> None:
    from hybridtf.cli.compare import _by_task, make_tasks

    def record(kind: str, digest: str, **fields: str) -> dict[str, str]:
        return {"kind": kind, "recipe": "a", "recipe_hash": digest, **fields}

    one, two, cost = record("quality", "1", task="x"), record("train", "2", task="y"), record("memory", "1")
    assert _by_task([one, two, cost, record("sweep", "3", task="x")]) == {"x": [one, cost], "y": [two]}
    assert _by_task([cost]) == {None: [cost]}
    assert make_tasks(None) is None
    made = make_tasks(["niah_single", "niah_multikey"])
    assert made is not None
    assert [config.to_dict()["type"] for config in made.values()] == ["needles", "needles"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_compare_over_tasks_and_learning_rates(recipe: str, tmp_path: Path) -> None:
    tasks = ("--task", "induction_heads_small", "--task", "mqar_small")
    quick = ("--steps", 1, "--context", 16, "--repeats", 1, "--eval-tokens", 40, "--set", "train.batch_size=1")
    arguments = ["compare", recipe, "-o", tmp_path / "out", *tasks, "--lr", "1e-3,1e-2", *quick]
    arguments += ["--set", "model.max_seq_len=128"]
    result = ok(*arguments)
    assert "Comparison: induction_heads_small" in result.stdout
    assert "Comparison: mqar_small" in result.stdout
    found = json.loads(ok(*arguments, "--json").stdout)
    assert [row["task"] for row in found["table"]] == ["induction_heads_small", "mqar_small"]
    assert {r["lr"] for r in select(found["records"], "sweep")} == {1e-3, 1e-2}
    assert all("that was tried" in r["note"] for r in select(found["records"], "quality"))
    rows = as_json("report", tmp_path / "out")["table"]
    assert {row["task"] for row in rows} == {"induction_heads_small", "mqar_small"}


def test_wrong_tasks_and_learning_rates(recipe: str, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert "mqar_small" in refused("compare", recipe, *out, "--task", "mqar_smal")
    assert refused("compare", recipe, *out, "--task", "mqar_small", "--task", "mqar_small") == "--task names 'mqar_small' twice"
    assert "numbers with commas between" in refused("compare", recipe, *out, "--lr", "1e-3,a")
    assert "must differ and be above 0" in refused("compare", recipe, *out, "--lr", "0")
    assert "max_seq_len = 32 is less than the" in refused("compare", recipe, *out, "--task", "mqar_small")
    assert not (tmp_path / "out").exists()


def test_without_the_report_extra_the_table_is_still_shown(
    compared: tuple[list[object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, _ = compared
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = ok(*arguments)
    assert "warning: no report was written, its extra is not installed: pip install 'hybridtf[report]'" in result.stderr
    assert "bigram" in result.stdout


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_of_records(compared: tuple[list[object], Path], tmp_path: Path) -> None:
    _, folder = compared
    result = ok("report", folder / "out", "-o", tmp_path / "r.html", "--charts", tmp_path / "charts", "--title", "Of two")
    assert result.stdout == ""
    assert "<title>Of two</title>" in (tmp_path / "r.html").read_text()
    assert list((tmp_path / "charts").glob("*.svg"))
    result = ok("report", folder / "out", "--markdown", tmp_path / "t.md", "--latex", tmp_path / "t.tex", "--title", "Of two")
    assert result.stdout == ""
    assert (tmp_path / "t.md").read_text().startswith("# Of two\n\n## Comparison\n")
    assert r"\label{tab:comparison}" in (tmp_path / "t.tex").read_text()
    assert ok("report", folder / "out" / "records.jsonl").stdout == (folder / "stdout").read_text()
    assert [row["recipe"] for row in as_json("report", folder / "out")["table"]] == ["tiny", "attention"]


def test_records_that_cannot_be_read(compared: tuple[list[object], Path], tmp_path: Path) -> None:
    _, folder = compared
    file = tmp_path / "records.jsonl"
    file.write_bytes((folder / "out" / "records.jsonl").read_bytes() + b"{torn")
    lines = len(file.read_text().splitlines())
    assert f"{file}, line {lines}: " in refused("report", file)
    result = ok("report", file, "--skip-corrupt")
    assert "warning: lines left out, since they are no whole records: 1" in result.stderr
    assert "cannot be read" in refused("report", tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no records" in refused("report", tmp_path / "empty.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["kind"]


@pytest.mark.parametrize(("columns", "turned"), [(200, False), (80, True)])
def test_a_table_that_is_too_wide_is_turned(
    compared: tuple[list[object], Path], monkeypatch: pytest.MonkeyPatch, columns: int, turned: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ok("report", compared[1] / "out").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("bits/byte at 16x") for line in lines) == turned
    assert any(line.startswith("attention") for line in lines) != turned
