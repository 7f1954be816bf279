"""Options that several commands have, each written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Compute with N threads, tied to as many cores.")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Timed runs of each phase.")]
Limit = Annotated[
    str | None, typer.Option("--limit", metavar="SIZE", help="Also find the longest length that fits, as in 8GB.")
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="model|ema", help="The trained weights, or the average that the run kept of them.")
]


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command whose first parameter is of the dataclass ``options``: its fields are options of the command too."""
    shared = inspect.signature(options, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared.values(), *own)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(options(**{name: given.pop(name) for name in shared}), **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
