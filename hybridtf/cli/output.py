"""What a command says: results on stdout, messages on stderr, JSON alone where it was asked for.

A terminal gets colour and its own width; anything else plain lines that are never cut or wrapped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybridtf.report import Table as Measures

UNBOUNDED = 10_000
"""Columns where there is no terminal to be filled."""


def say(message: str) -> None:
    """A message for the person, on stderr."""
    print(f"hybridtf: {message}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """The result for a program: one JSON value, alone on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """stdout for people."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=UNBOUNDED if wide else None, highlight=False, markup=False, emoji=False)


def print_text(text: str) -> None:
    """Lines as they are."""
    print(text)


def make_table(*heads: str, title: str | None = None, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in ``right`` hold numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=None if title is None else Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for head in heads:
        table.add_column(Text(head), overflow="fold", justify="right" if head in right else "left")
    return table


def add_row(table: Table, *cells: object) -> None:
    """A row of plain cells: brackets in them are no markup."""
    from rich.text import Text

    table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def print_table(table: Table) -> None:
    """The table with an empty line after it."""
    out = console()
    out.print(table, crop=False, no_wrap=not out.is_terminal, overflow="ignore" if not out.is_terminal else "fold")
    out.print()


def print_measures(table: Measures) -> None:
    """A table of measurements; where the terminal is too narrow for it, with a column a recipe instead of a row."""
    from rich.measure import Measurement
    from rich.text import Text

    out, wide = console(), table.to_rich()
    if Measurement.get(out, out.options.update(max_width=UNBOUNDED), wide).minimum <= out.width:
        out.print(wide)
        return
    names, *columns = table.columns
    heads = [table.text(row, names) for row in table.rows]
    narrow = make_table("", *heads, title=table.title, right=tuple(heads))
    for column in columns:
        add_row(narrow, table.head(column), *(table.text(row, column) for row in table.rows))
    print_table(narrow)
    for note in table.notes:
        out.print(Text(note))


@contextmanager
def interruptible(saved: str) -> Iterator[None]:
    """Inside, Ctrl-C ends the command with 130 and says what was ``saved``."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {saved}")
        raise typer.Exit(130) from None
