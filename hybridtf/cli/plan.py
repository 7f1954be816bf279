"""``plan``: what a recipe will need at any length, before anything runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import BatchSize, Json, Set
from hybridtf.cli.output import add_row, console, counted, make_table, print_json, print_table
from hybridtf.cli.sources import name_of, read_recipe, registries

if TYPE_CHECKING:
    from rich.table import Table

_LENGTH = re.compile(r"(\d+)([kM]?)")

UNKNOWN = "unknown"
LONGEST = 1 << 28
"""Tokens a row: a count keeps whole numbers real, positions among them, and those of this many take 2 GiB."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("plan")(plan)


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file or name.")],
    length: Annotated[
        list[str] | None, typer.Option("--length", metavar="N", help="Tokens a row; may be repeated. Default: 1k, 64k.")
    ] = None,
    batch_size: BatchSize = 1,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="h200, h100, a100 or cpu.")] = "h200",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, or bfloat16 or float16 by autocast.")] = "float32",
    set_: Set = None,
    json: Json = False,
) -> None:
    """Say what a recipe will cost, before it runs.

    Operations, bytes and times in training, prefill and decode, and what fits. Everything is counted from the model built
    without memory. Times are the least that the device's data sheet allows.
    """
    import torch

    from hybridtf.bench.subject import Subject
    from hybridtf.core import ConfigError
    from hybridtf.cost import attention_sibling, device_named, make_plan

    registries()
    lengths = [parse_length(text) for text in length or ("1k", "64k")]
    target, read, name = device_named(device), read_recipe(recipe, set_), name_of(recipe)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype}: allowed are float32, bfloat16 and float16")
    autocast = None if dtype == "float32" else getattr(torch, dtype)
    sibling = attention_sibling(read.model)
    other = None if sibling is None else read.model_copy(update={"model": sibling})
    found = make_plan(
        Subject.from_recipe(read, name, autocast=autocast), lengths=lengths, batch_size=batch_size, device=target,
        sibling=None if other is None else Subject.from_recipe(other, f"{name}, attention", autocast=autocast),
    )
    found = {"name": name, "dtype": dtype, **found}
    if json:
        print_json(found)
    else:
        print_plan(found)


def parse_length(text: str) -> int:
    """Tokens of ``1024``, ``64k`` (of 1024) or ``1M`` (1024 k). Raises :class:`ConfigError`."""
    from hybridtf.core import ConfigError

    match = _LENGTH.fullmatch(text.strip())
    length = int(match[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[match[2]] if match else 0
    if length < 1:
        raise ConfigError(f"--length {text}: is no length; write 1024, 64k or 1M")
    if length > LONGEST:
        raise ConfigError(f"--length {text}: at most {LONGEST >> 20}M can be counted")
    return length


def print_plan(found: dict[str, Any]) -> None:
    """The plan for people."""
    out = console()
    trust = "" if found["validated"] else ", unvalidated: no time on it was held against a measured one"
    out.print(f"{found['name']}: {counted(found['params']['total'], 'parameter')} on {found['device']}{trust}", style="bold")
    out.print(f"{counted(found['batch_size'], 'row')} in {found['dtype']}; ~: carried on from shorter lengths\n")
    print_table(_phases(found))
    if found["state_bytes"] is not None:
        print_table(_states(found["state_bytes"]))
    for phase, fits in found["fits"].items():
        more = " or more" if fits["at_least"] else ""
        out.print(f"{phase}: fits up to {counted(fits['length'], 'token')} a row{more}")
    for what, at in found.get("crossover", {}).items():
        where = "at no length" if at is None else f"from {counted(at, 'token')} on"
        out.print(f"{what}: less than with attention in every layer {where}")


def _phases(found: dict[str, Any]) -> Table:
    heads = ("tokens", "FLOPs", "peak", "weights", "gradients", "optimizer", "activations", "state", "largest batch", "seconds")
    table = make_table("phase", *heads, "bound by", "", right=heads)
    for phase, rows in found["phases"].items():
        for length, row in rows.items():
            sizes = [_bytes(row["bytes"][kind]) for kind in heads[2:8]]
            flops = UNKNOWN if row["unknown"] else f"{sum(row['flops'].values()):.4g}"
            seconds = UNKNOWN if row["seconds"] is None else f"{row['seconds']:.3g}"
            add_row(
                table, phase, f"{int(length):,}", flops, *sizes, f"{row['largest_batch']:,}", seconds,
                row["bound"] or UNKNOWN, "" if row["traced"] else "~",
            )
    return table


def _states(sizes: dict[str, dict[str, int]]) -> Table:
    heads = ("tokens", "bytes", "kv", "ring", "recurrent", "conv", "a token adds")
    table = make_table(*heads, title="state of all rows", right=heads)
    for length, size in sizes.items():
        cells = [_bytes(size[key]) for key in ("allocated", "kv", "ring", "recurrent", "conv", "per_token")]
        add_row(table, f"{int(length):,}", *cells)
    return table


def _bytes(size: int) -> str:
    """``1.50 GiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} B"
