"""``train``, ``eval`` and ``stats``: a recipe becomes a run, which is scored on held-out data and looked into."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import BatchSize, Device, Json, Records, Set, Step, Weights
from hybridtf.cli.output import add_row, counted, interruptible, make_table, print_json, print_table, print_text
from hybridtf.cli.sources import (
    build_on_meta,
    choose_device,
    name_of,
    need_folder,
    need_train,
    read_recipe,
    read_run,
    registries,
    run_subject,
    save_records,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridtf.bench.records import Record
    from hybridtf.recipe import Recipe
    from hybridtf.train import TrainResult


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("train")(train)
    app.command("eval")(evaluate)
    app.command("stats")(stats)


def train(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="The run's folder.")],
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe file or name; not needed with --resume.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="CKPT", help="Start from the weights of this run, checkpoint or model folder."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in RUN from its newest checkpoint.")] = False,
    set_: Set = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Shorthand for --set train.seed=N.")] = None,
    device: Device = None,
) -> None:
    """Train a recipe into a run folder.

    Ctrl-C or SIGTERM finishes the step and saves; --resume continues bit for bit.
    """
    from hybridtf.train import train as run

    if recipe is None and not resume:
        raise typer.BadParameter("a new run needs a recipe", param_hint="RECIPE")
    registries()
    need_folder(output)
    overrides = [*(set_ or ()), *([] if seed is None else [f"train.seed={seed}"])]
    made = _recipe_of_run(output, overrides) if recipe is None else read_recipe(recipe, overrides)
    if recipe is not None and made is not None:
        need_train(made, recipe, "--set train.steps=1000")
        build_on_meta(made, recipe)
    with interruptible(f"what was saved before is in {output}"):
        result = run(made, output, device=choose_device(device), resume=resume, init_from=from_)
    print_text(_summary(result))


def _recipe_of_run(run: Path, overrides: list[str]) -> Recipe | None:
    """The recipe that the run itself keeps, changed; None, which resumes it as it is, where nothing is to be changed."""
    from hybridtf.train import RunFolder
    from hybridtf.train.checkpoint import RECIPE

    return read_recipe(str(RunFolder(run).checkpoint() / RECIPE), overrides) if overrides else None


def _summary(result: TrainResult) -> str:
    """``runs/a: 1,000 steps, 512,000 scored tokens, 93 s of training, 4 s of evaluation; held out: perplexity 4.1``."""
    line = f"{result.path}: {counted(result.steps, 'step')}, {counted(result.tokens, 'scored token')}, "
    line += f"{result.seconds:.0f} s of training, {result.eval_seconds:.0f} s of evaluation"
    if result.metrics is None:
        return line
    line += f"; held out: {_scores(result.metrics)}"
    return line if result.ema_metrics is None else f"{line}; of the average: {_scores(result.ema_metrics)}"


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, checkpoint or model folder.")],
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Tokens of a window. Default: the trained length.")
    ] = None,
    batch_size: BatchSize = 8,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Score only this many tokens, the first of each document.")
    ] = None,
    step: Step = None,
    weights: Weights = "model",
    device: Device = None,
    output: Records = None,
    json: Json = False,
) -> None:
    """Score a run on held-out data.

    What trivial models reach on the same data is shown beside it.
    """
    from hybridtf.bench.quality import measure_quality
    from hybridtf.core import DataError

    registries()
    loaded = read_run(run, device, step, weights)
    if loaded.recipe.task is None:
        raise DataError(f"{run}: its recipe has no section [task], so there is nothing to score it on")
    trained = loaded.recipe.train.seq_len if loaded.recipe.train is not None else 256
    with interruptible("nothing was written"):
        record = measure_quality(
            run_subject(loaded, name_of(run) + (" (ema)" if weights == "ema" else "")),
            loaded.model, loaded.recipe.task.load(0),
            seq_len=seq_len or trained,
            batch_size=batch_size,
            max_tokens=max_tokens,
        )
    save_records(output, [record])
    if json:
        print_json(record)
        return
    _print_score(record)


def _print_score(record: Record) -> None:
    """The score above the baselines on the same text, the best first."""
    heads = (record["metric"], "95 %")
    title = f"{counted(record['n_tokens'], 'held-out token')} of task {record['task']}"
    table = make_table("model", *heads, title=title, right=heads)
    low_high = "" if record["interval"] is None else "{:.4f} to {:.4f}".format(*record["interval"])
    add_row(table, record["recipe"], f"{record['value']:.4f}", low_high)
    best_first = sorted(record["baselines"].items(), key=lambda item: item[1], reverse=record["higher_is_better"])
    for name, value in best_first:
        add_row(table, name, f"{value:.4f}", "")
    print_table(table)
    _print_groups(record)
    if record["note"]:
        print_text(record["note"])


def _print_groups(record: Record) -> None:
    """The score of each kind of row that the task tells apart."""
    if not record["groups"]:
        return
    heads = (record["metric"], "95 %")
    table = make_table("rows", *heads, right=heads)
    for name, score in record["groups"].items():
        low_high = "" if score["interval"] is None else "{:.4f} to {:.4f}".format(*score["interval"])
        add_row(table, name, f"{score['value']:.4f}", low_high)
    print_table(table)


STATISTICS = (
    "grad_norm", "grad_rms", "weight_rms", "update_ratio", "activation_rms", "activation_max", "activation_zeros",
    "activation_kurtosis",
)
"""Columns of the table of layers."""


def stats(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    step: Annotated[int | None, typer.Option("--step", min=1, help="The line of this step. Default: the last.")] = None,
    json: Json = False,
) -> None:
    """Show gradients, weights and activations of every layer.

    The run must have been trained with train.stats_every.
    """
    line = _stats_line(run, step)
    if json:
        print_json(line)
        return
    heads = [name.replace("activation_", "act_") for name in STATISTICS]
    table = make_table("layer", *heads, title=f"Layers at step {line['step']}", right=tuple(heads))
    for name, layer in line["layers"].items():
        label = name if "weights_of" not in layer else f"{name} (weights of {layer['weights_of']})"
        values = [layer.get(statistic, "") for statistic in STATISTICS]
        add_row(table, label, *("not finite" if v is None else v if isinstance(v, str) else f"{v:.3g}" for v in values))
    print_table(table)


def _stats_line(run: Path, step: int | None) -> dict[str, Any]:
    from hybridtf.core import CheckpointError
    from hybridtf.train import RunFolder, read_log

    log = RunFolder(run).log
    if not log.is_file():
        raise CheckpointError(f"{log}: no such file; give the folder of a run")
    lines = {line["step"]: line for line in read_log(log) if line.get("event") == "stats"}
    if not lines:
        raise CheckpointError(f"{run}: has no statistics of layers; train with --set train.stats_every=N")
    if step is not None and step not in lines:
        raise CheckpointError(f"{run}: has no statistics of step {step}. Steps: {', '.join(map(str, lines))}")
    return lines[max(lines) if step is None else step]
