"""``compare`` and ``report``: recipes trained and measured side by side, and records as a table and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hybridtf.cli.options import Device, Json, Limit, Recipes, Repeats, Set
from hybridtf.cli.output import counted, interruptible, print_json, print_measures, say
from hybridtf.cli.sources import (
    build_on_meta,
    choose_device,
    names_of,
    need_file,
    need_folder,
    need_train,
    parse_size,
    read_recipe,
    registries,
    table_json,
)

if TYPE_CHECKING:
    from hybridtf.bench import CompareOptions
    from hybridtf.bench.records import Record, Records
    from hybridtf.core import TaskConfig
    from hybridtf.recipe import Recipe

RECORDS, REPORT = "records.jsonl", "report.html"

Folder = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Runs, records.jsonl and report.html go here.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds that every recipe is trained with.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, instead of the recipes' own.")]
EvalTokens = Annotated[
    int, typer.Option("--eval-tokens", min=0, help="Score so many held-out tokens, the first of each document; 0: all.")
]
MaxDocuments = Annotated[int, typer.Option("--max-documents", min=1, help="Documents to read beyond the trained length.")]
TaskNames = Annotated[
    list[str] | None, typer.Option("--task", metavar="NAME", help="Train on this task, not the recipes' own. May be repeated.")
]
Rates = Annotated[
    str | None, typer.Option("--lr", metavar="LR,...", help="Learning rates to choose from, on a third side.")
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Trainings at once, each in a process of its own.")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="S", help="End a training that takes more than S seconds.")]
Prompt = Annotated[int, typer.Option("--context", min=1, help="Tokens of the prompt in prefill and decode.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("compare")(compare)
    app.command("report")(report)


def compare(
    recipes: Recipes,
    output: Folder,
    seeds: Seeds = 1,
    task: TaskNames = None,
    lr: Rates = None,
    workers: Workers = 1,
    timeout: Timeout = None,
    steps: Steps = None,
    set_: Set = None,
    eval_tokens: EvalTokens = 100_000,
    max_documents: MaxDocuments = 16,
    context: Prompt = 1024,
    repeats: Repeats = 10,
    limit: Limit = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Train recipes and measure them side by side.

    Writes records.jsonl and report.html. What is in DIR already is not done again, and a run that was
    interrupted goes on where it stopped. Exit code 1 when the training of a recipe failed.
    """
    from hybridtf.bench import CompareOptions

    registries()
    need_folder(output)
    options = CompareOptions(
        steps=steps, device=choose_device(device), eval_tokens=eval_tokens or None, max_documents=max_documents,
        context=context, repeats=repeats, limit_bytes=None if limit is None else parse_size(limit, "--limit"),
        tasks=make_tasks(task), learning_rates=make_rates(lr), workers=workers, timeout_s=timeout,
    )  # fmt: skip
    records = _measure(_named(recipes, set_, steps), output, seeds, options)
    _print(records, json)
    page = _write_report(records, output / REPORT)
    if page is not None:
        say(f"report: {page}")
    _fail(records)


def _measure(named: dict[str, Recipe], output: Path, seeds: int, options: CompareOptions) -> Records:
    from hybridtf.bench import compare as run
    from hybridtf.bench import read_records
    from hybridtf.train import Interrupted

    file = output / RECORDS
    before = len(read_records(file, skip_corrupt=True)) if file.is_file() else 0
    saved = f"what was measured is in {file}, and the same command goes on from there"
    with interruptible(saved):
        try:
            records = run(named, output, seeds=range(seeds), options=options, say=say)
        except Interrupted as stopped:
            say(f"interrupted after step {stopped.step}, which is saved in {stopped.path}; {saved}")
            raise typer.Exit(stopped.exit_code) from None
    if len(read_records(file, skip_corrupt=True)) == before:
        say(f"everything was in {file} already; nothing was measured again")
    return records


def make_tasks(names: Sequence[str] | None) -> dict[str, TaskConfig] | None:
    """Registered tasks and presets by name."""
    from hybridtf.core import ConfigError, active

    if names is None or not names:
        return None
    if len(set(names)) < len(names):
        raise ConfigError(f"--task names {max(names, key=names.count)!r} twice")
    return {name: cast("TaskConfig", active()["tasks"].make({"type": name})) for name in names}


def make_rates(text: str | None) -> tuple[float, ...]:
    """The learning rates of ``1e-3,3e-3``."""
    from hybridtf.core import ConfigError

    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(f"--lr {text}: must be numbers with commas between, as in 1e-3,3e-3") from None


def _named(sources: Sequence[str], overrides: Sequence[str] | None, steps: int | None = None) -> dict[str, Recipe]:
    """Recipes by the name that records call them."""
    found = {name: read_recipe(source, overrides, steps) for name, source in zip(names_of(sources), sources, strict=True)}
    for recipe, source in zip(found.values(), sources, strict=True):
        need_train(recipe, source, "--steps 1000")
        build_on_meta(recipe, source)  # what is wrong with the last recipe is said before the first one is trained
    return found


def _print(records: Records, json: bool) -> None:
    """One table a task: recipes are compared on one task each time."""
    from dataclasses import replace

    from hybridtf.report import compare_table

    tables = {task: compare_table(part) for task, part in _by_task(records).items()}
    if records.skipped:
        say(f"warning: lines left out, since they are no whole records: {records.skipped}")
    if json:
        parts = [table_json(table, ()) for table in tables.values()]
        rows = [{"task": task, **row} for task, part in zip(tables, parts, strict=True) for row in part["table"]]
        notes = list(dict.fromkeys(note for part in parts for note in part["notes"]))
        print_json({"table": rows, "notes": notes, "records": list(records)})
        return
    for task, table in tables.items():
        print_measures(table if len(tables) == 1 else replace(table, title=f"{table.title}: {task}"))


def _by_task(records: Records) -> dict[str | None, list[Record]]:
    """The records by the task that their recipe was trained on; what no record says a task of is of None."""
    said = [r for r in records if r["kind"] in ("train", "quality") and r.get("task")]
    tasks = {(r["recipe"], r["recipe_hash"]): str(r["task"]) for r in said}
    groups: dict[str | None, list[Record]] = {}
    for record in records:
        if record["kind"] != "sweep":
            groups.setdefault(tasks.get((record["recipe"], record["recipe_hash"])), []).append(record)
    return groups


def _write_report(records: Sequence[Record], path: Path) -> Path | None:
    """The report, or None and a warning where its extra is not installed: the measurements were the work."""
    from importlib.util import find_spec

    from hybridtf.report import write_report

    if not all(map(find_spec, ("altair", "vl_convert", "jinja2"))):
        say("warning: no report was written, its extra is not installed: pip install 'hybridtf[report]'")
        return None
    return write_report(records, path)


def _fail(records: Sequence[Record]) -> None:
    # Of two records of one training the later one counts: what failed was tried again.
    trained = {(r["recipe"], r["recipe_hash"], r["seed"]): r.get("failed") for r in records if r["kind"] == "train"}
    failed = {key: reason for key, reason in trained.items() if reason}
    for (name, _, _), reason in failed.items():
        say(f"failed: {name}: {reason}")
    if failed:
        raise typer.Exit(1)


def report(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="Records (.jsonl), or folders that compare made.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write one HTML page that needs no network."),
    ] = None,
    charts: Annotated[
        Path | None, typer.Option("--charts", metavar="DIR", help="Write every chart as SVG and PNG into this folder.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write all tables as Markdown into this file.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option("--latex", metavar="FILE", help="Write all tables as LaTeX (booktabs) into this file.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The title of the page.")] = None,
    skip_corrupt: Annotated[bool, typer.Option("--skip-corrupt", help="Leave out lines that are no whole records.")] = False,
    json: Json = False,
) -> None:
    """Turn records into tables, one HTML file, and charts.

    Where no file is asked for, the comparison is printed.
    """
    from hybridtf.bench.records import read_records
    from hybridtf.core import DataError

    registries()
    for file in (output, markdown, latex):
        need_file(file)
    if charts is not None:
        need_folder(charts)
    records = read_records([path / RECORDS if path.is_dir() else path for path in sources], skip_corrupt=skip_corrupt)
    if not records:
        raise DataError(f"{', '.join(map(str, sources))}: no records")
    if json or (output, charts, markdown, latex) == (None, None, None, None):
        _print(records, json)
    _write(records, title, output, charts, markdown, latex)


def _write(
    records: Records, title: str | None, output: Path | None, charts: Path | None, markdown: Path | None, latex: Path | None
) -> None:
    """What was asked for of the page, the charts and the tables."""
    from hybridtf.report import save_charts, write_latex, write_markdown, write_report

    if output is not None:
        say(f"report: {write_report(records, output, title)}")
    if markdown is not None:
        say(f"tables: {write_markdown(records, markdown, title)}")
    if latex is not None:
        say(f"tables: {write_latex(records, latex)}")
    if charts is not None:
        say(f"charts: {counted(len(save_charts(records, charts)), 'file')} in {charts}")
