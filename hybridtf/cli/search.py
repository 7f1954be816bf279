"""``search``: stacks of a space tried at equal parameters, and the best one as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridtf.cli.compare import EvalTokens, make_rates, make_tasks
from hybridtf.cli.match import parse_count
from hybridtf.cli.options import Device, Json
from hybridtf.cli.output import add_row, interruptible, make_table, print_json, print_table, say
from hybridtf.cli.sources import choose_device, need_folder, registries

if TYPE_CHECKING:
    from hybridtf.bench.records import Record
    from hybridtf.search import Evaluation, Search, Trial

SHOWN = 10
"""Trials in the printed table; trials.md has all."""


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("search")(search)


def search(
    space: Annotated[str, typer.Argument(metavar="SPACE", help="A .space.toml file, or the name of an installed one.")],
    task: Annotated[list[str], typer.Option("--task", metavar="NAME", help="Score stacks on this task. May be repeated.")],
    params: Annotated[str, typer.Option("--params", metavar="N", help="Parameters of every stack, as in 125M.")],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Stacks to try, those of earlier calls included.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The search and all its runs go here.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Train every stack with so many seeds.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the proposals.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, instead of the space's own.")] = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="LR,...", help="Learning rates; the best counts.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Trainings at once, each in a process of its own.")] = 1,
    timeout: Annotated[float | None, typer.Option("--timeout", metavar="S", help="End a training that takes longer.")] = None,
    eval_tokens: EvalTokens = 100_000,
    device: Device = None,
    json: Json = False,
) -> None:
    """Search a space of stacks at equal parameters.

    A score is the mean over tasks of where a stack stands between the best trivial model (0) and perfect (1), on a
    side kept to choose on. The best stack is then measured on what is held out. Writes trials.md, trials.json,
    best.toml and records.jsonl; a search that was interrupted goes on with the same command.
    """
    from dataclasses import replace

    from hybridtf.search import Evaluation, Search, best_recipe, largest_vocabulary, load_space, with_third_sides, write_outcome
    from hybridtf.search.trials import OPTIONS

    registries()
    need_folder(output)
    checked, n_params = load_space(space), parse_count(params, "--params")
    tasks = with_third_sides(make_tasks(task) or {})
    options = replace(
        OPTIONS, device=choose_device(device), steps=steps, learning_rates=make_rates(lr), workers=workers, timeout_s=timeout,
        eval_tokens=eval_tokens or None,
    )
    evaluation = Evaluation(output, tasks, range(seeds), options, say)
    asked = {"tasks": {name: config.to_dict() for name, config in tasks.items()}, "seeds": seeds, "steps": steps,
             "lr": list(options.learning_rates), "eval_tokens": eval_tokens}
    work = Search(checked, n_params, largest_vocabulary(tasks), evaluation, asked, seed, say)
    with interruptible(f"what was tried is in {output}, and the same command goes on from there"):
        found, held_out = _run(work, evaluation, output, trials)
    best = best_recipe(work, found)
    write_outcome(output, found, best)
    _print(found, held_out, json)
    say(f"best: {output / 'best.toml'}; all trials: {output / 'trials.md'}")


def _run(work: Search, evaluation: Evaluation, output: Path, n_trials: int) -> tuple[list[Trial], list[Record]]:
    """The trials, and what the best of them reaches on what is held out."""
    from hybridtf.search import best_recipe
    from hybridtf.train import Interrupted

    try:
        found = work.run(output, n_trials)
        best_recipe(work, found)  # whether there is one
        best = found[0].stack
        held_out = evaluation.confirm({best.name: work.recipe(best)})
    except Interrupted as stopped:
        say(f"interrupted after step {stopped.step}, which is saved in {stopped.path}; the same command goes on")
        raise typer.Exit(stopped.exit_code) from None
    return found, [r for r in held_out if r["kind"] == "quality"]


def _print(found: list[Trial], held_out: list[Record], json: bool) -> None:
    from hybridtf.search import trials_json

    if json:
        print_json({"trials": trials_json(found), "held_out": held_out})
        return
    tasks = list(found[0].by_task)
    table = make_table("stack", "score", *tasks, title="best trials", right=("score", *tasks))
    for trial in found[:SHOWN]:
        score = "failed" if trial.score is None else f"{trial.score:.3f}"
        add_row(table, trial.stack.name, score, *(f"{trial.by_task[t]:.3f}" if t in trial.by_task else "-" for t in tasks))
    print_table(table)
    held = make_table("task", "seed", "measure", "value", title=f"held out: {found[0].stack.name}", right=("seed", "value"))
    for record in held_out:
        add_row(held, record["task"], record["seed"], record["metric"], f"{record['value']:.4f}")
    print_table(held)
