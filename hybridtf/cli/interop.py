"""``import`` and ``export``: published checkpoints in and out. ``lm-eval``: a model in lm-evaluation-harness."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json, Step, Weights
from hybridtf.cli.output import add_row, counted, interruptible, make_table, print_json, print_json_line, print_table
from hybridtf.cli.sources import need_folder, read_run, registries

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.table import Table

    from hybridtf.interop.parity import Parity


class Dtype(StrEnum):
    """What the tensors are kept in."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Format(StrEnum):
    """Whose files are written."""

    transformers = "transformers"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("import")(import_)
    app.command("export")(export)
    app.command("parity")(parity)
    app.command("lm-eval", context_settings={"ignore_unknown_options": True})(lm_eval)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The model folder to write.")],
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Keep the tensors in it. Default: that of the files, or the widest of them.")
    ] = None,
    json: Json = False,
) -> None:
    """Read a published checkpoint as a recipe and weights.

    Every setting has to be understood and every tensor to have its place, or nothing is written.
    """
    import torch

    from hybridtf.interop import import_checkpoint
    from hybridtf.train import save_model

    registries()
    need_folder(output)
    with interruptible("nothing was written"):
        found = import_checkpoint(folder, dtype=None if dtype is None else getattr(torch, dtype.value))
        save_model(found.model, found.recipe, output)
    about = {"family": found.family.model_type, **_about(found.model), "dtype": _word(found.dtype), "notes": list(found.notes)}
    if json:
        print_json({**about, "output": str(output)})
        return
    print(f"{about['family']}: {counted(about['parameters'], 'parameter')}, {about['dtype']}, pattern {about['pattern']}")
    for note in found.notes:
        print(note)
    print(f"written: {output}")


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, checkpoint or model folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write.")],
    to: Annotated[Format, typer.Option("--to", help="Whose files to write.")] = Format.transformers,
    family: Annotated[
        str | None, typer.Option("--family", metavar="NAME", help="The published family. Default: the one that has this model.")
    ] = None,
    step: Step = None,
    weights: Weights = "model",
    json: Json = False,
) -> None:
    """Write a model as a checkpoint that transformers loads.

    The model has to be one of a published family, exactly; else it is said what no family has.
    """
    from hybridtf.core import CheckpointError
    from hybridtf.interop import export_checkpoint
    from hybridtf.models import LanguageModel

    registries()
    loaded = read_run(run, "cpu", step, weights)
    if not isinstance(loaded.model, LanguageModel):
        raise CheckpointError(f"{run}: is no language model of ours, and no family has it")
    with interruptible("nothing was written"):
        found = export_checkpoint(loaded.model, output, family=family)
    if json:
        about = {"family": found.model_type, "architecture": found.architecture, **_about(loaded.model)}
        print_json({**about, "output": str(output)})
        return
    print(f"{found.model_type} ({found.architecture}), written: {output}")


def parity(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR...", help="Checkpoints that transformers reads.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="The reference models of the repository's tests.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, alone on stdout.")] = False,
) -> None:
    """Hold imported checkpoints beside transformers.

    Largest differences of scores, in float64 but for one column. Exit code 1 when one does not pass.
    """
    from hybridtf.core import ConfigError
    from hybridtf.interop.parity import LocalCheckpoint, Reference, parity_of, repository_references

    registries()
    if bool(folders) is all_:
        raise ConfigError("name folders, or give --all")
    references: list[Reference] = [LocalCheckpoint(folder) for folder in folders or ()]
    rows: list[Parity] = []
    for reference in references or repository_references():
        rows.append(parity_of(reference))
        if json:
            print_json_line(rows[-1].to_json())
    if not json:
        print_table(_parities(rows))
        print(f"{sum(row.passed for row in rows)} of {len(rows)} pass")
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="What lm_eval takes.")] = None,
) -> None:
    """lm_eval itself, with models of ours as --model hybridtf.

    All that follows is lm-eval's: hybridtf lm-eval --model hybridtf --model_args pretrained=RUN --tasks NAME
    (without anything, its own help; lm_eval run --help tells its options).
    """
    from hybridtf.interop.lm_eval import run

    run(arguments or ["--help"])


def _parities(rows: Sequence[Parity]) -> Table:
    numbers = ("float64", "float32", "decode", "packed", "padded")
    table = make_table("reference", "family", "parameters", "pattern", *numbers, "", right=("parameters", *numbers))
    for row in rows:
        cells = [getattr(row, name) for name in numbers]
        parameters = "" if row.parameters is None else f"{row.parameters:,}"
        said = [row.name, row.family or "", parameters, row.pattern or "", *("" if x is None else f"{x:.0e}" for x in cells)]
        verdict = "pass" if row.passed else None if row.family is None else "FAILED"
        add_row(table, *said, "; ".join(filter(None, (verdict, row.why))))
    return table


def _about(model: Any) -> dict[str, Any]:
    from hybridtf.cost import parameter_counts

    (stack,) = model.config.stacks()
    return {"parameters": parameter_counts(model)["total"], "pattern": stack.pattern}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
