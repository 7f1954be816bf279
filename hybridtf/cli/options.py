"""Options that several commands have, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change an option of the recipe, as in train.steps=100. May be repeated."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: a GPU if there is one.")
]
Records = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Append the records to this .jsonl file.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="The checkpoint of this step. Default: the newest.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows at once.")]
Recipes = Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipe files or names.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Timed runs of each phase.")]
Limit = Annotated[
    str | None, typer.Option("--limit", metavar="SIZE", help="Also find the longest length that fits, as in 8GB.")
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="model|ema", help="The trained weights, or the average that the run kept of them.")
]
