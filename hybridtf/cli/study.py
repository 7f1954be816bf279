"""``study``: published findings reproduced small, each by one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridtf.cli.options import Json
from hybridtf.cli.output import add_row, interruptible, make_table, print_json, print_table, say
from hybridtf.cli.sources import need_folder, registries

if TYPE_CHECKING:
    from hybridtf.studies import Study, StudyResult

ALL, LIST = "all", "list"


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("study")(study)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME|all|list", help="One study, all of them, or a list of what there is.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Each study has a folder here.")] = Path(
        "runs/studies"
    ),
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Number of seeds, instead of the study's own.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that train at once.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few steps on a few rows: does everything run?")] = False,
    json: Json = False,
) -> None:
    """Reproduce a published finding in small.

    Writes records.jsonl, finding.json, finding.md and report.html to DIR/NAME. What is there already is not
    done again. Exit code 1 when a training failed; a claim that is not shown is a result.
    """
    from hybridtf.core import ConfigError
    from hybridtf.studies import find_study, studies

    registries()
    if name == LIST:
        if seeds is not None or workers != 1 or smoke:
            raise ConfigError("study list: --seeds, --workers and --smoke belong to a run; name a study, or all")
        _list(list(studies().values()), json)
        return
    chosen = list(studies().values()) if name == ALL else [find_study(name)]
    need_folder(output)
    results = [_run(one, output, seeds, workers, smoke) for one in chosen]
    if json:
        print_json([result.to_json() for result in results] if name == ALL else results[0].to_json())
    else:
        for result in results:
            _print(result)
    if any(record.get("failed") for result in results for record in result.last_trained()):
        raise typer.Exit(1)


def _list(found: list[Study], json: bool) -> None:
    if json:
        print_json([{"name": one.name, "title": one.title, "question": one.question, "paper": one.paper,
                     "recipes": list(one.recipes), "seeds": one.seeds} for one in found])
        return
    table = make_table("study", "question", "recipes", right=("recipes",))
    for one in found:
        add_row(table, one.name, one.question, len(one.recipes))
    print_table(table)


def _run(one: Study, output: Path, seeds: int | None, workers: int, smoke: bool) -> StudyResult:
    from hybridtf.studies import run_study
    from hybridtf.train import Interrupted

    folder = output / one.name
    saved = f"what was measured is in {folder}, and the same command goes on from there"

    def tell(line: str) -> None:
        say(f"{one.name}: {line}")

    with interruptible(saved):
        try:
            return run_study(one, folder, seeds=seeds, smoke=smoke, workers=workers, say=tell)
        except Interrupted as stopped:
            say(f"interrupted after step {stopped.step}, which is saved in {stopped.path}; {saved}")
            raise typer.Exit(stopped.exit_code) from None


def _print(result: StudyResult) -> None:
    table = make_table("claim", "expected", "mean", "seeds", "verdict", title=result.study.title, right=("mean", "seeds"))
    for claim in result.finding.claims:
        measured = [value for value in claim.by_seed.values() if value is not None]
        add_row(table, claim.statement, claim.expected, "-" if claim.mean is None else f"{claim.mean:.3f}", len(measured),
                claim.verdict)
    print_table(table)
    if result.smoke:
        say(f"{result.study.name}: a smoke run; its numbers say nothing")
    for note in result.finding.notes:
        say(f"{result.study.name}: {note}")
    if result.report is None:
        say("warning: no report was written, its extra is not installed: pip install 'hybridtf[report]'")
    say(f"{result.study.name}: finding in {result.folder}")
