"""What a command says: results on stdout, messages on stderr, JSON alone where it was asked for.

A terminal gets colour and its own width; anything else plain lines that are never cut or wrapped.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from hybridtf.report import Table as Measures

UNBOUNDED = 10_000
"""Columns where there is no terminal to be filled."""


def say(message: str) -> None:
    """A message for the person, on stderr."""
    print(f"hybridtf: {message}", file=sys.stderr, flush=True)


_warned: list[str] = []
"""Reasons that this command has given in a warning."""


def say_warning(what: str, reason: str) -> None:
    """A warning, whose reason an error after it need not say again."""
    _warned.append(reason)
    say(f"warning: {what}: {reason}")


def say_error(message: str) -> None:
    """An error on stderr; of what a warning of this command said already, that it did."""
    for reason in _warned:
        message = message.replace(f": {reason}", ", as the warning above says")
    say(f"error: {message}")


def begin_command() -> None:
    """Nothing has been said yet."""
    _warned.clear()


def print_json(value: Any) -> None:
    """The result for a program: one JSON value, alone on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_json_line(value: Any) -> None:
    """One of several results for a program, on a line of its own as soon as it is there."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def console() -> Console:
    """stdout for people."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # rich would end the process with 1; the program treats all broken pipes alike.
            self.quiet = True
            raise  # the BrokenPipeError that rich is handling

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Plain(width=UNBOUNDED if wide else None, highlight=False, markup=False, emoji=False)


def counted(n: int, what: str) -> str:
    """``1 step``, ``1,200 steps``: a number and its noun."""
    return f"{n:,} {what if n == 1 else what + 's'}"


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
    """The table with an empty line after it; where not even its longest words fit, a paragraph a row."""
    out = console()
    if _narrowest(out, table) > out.width:
        for line in _paragraphs(table, out.width):
            out.print(line, soft_wrap=True)
        return
    _share_width(out, table)
    out.print(table, crop=False, no_wrap=not out.is_terminal, overflow="ignore" if not out.is_terminal else "fold")
    out.print()


def _narrowest(out: Console, table: Table | Group) -> int:
    """Columns that the table needs so that no word is broken."""
    from rich.measure import Measurement

    return Measurement.get(out, out.options.update(max_width=UNBOUNDED), table).minimum


def _share_width(out: Console, table: Table) -> None:
    """Every column as wide as its longest word, and what is left to those that hold more: rich would break words."""
    from rich.measure import Measurement

    options = out.options.update(max_width=UNBOUNDED)
    if Measurement.get(out, options, table).maximum <= out.width:
        return
    spare = out.width - _narrowest(out, table)
    sizes = [[Measurement.get(out, options, cell) for cell in (c.header, *c.cells)] for c in table.columns]
    least = [max(cell.minimum for cell in cells) for cells in sizes]
    needs = [max(cell.maximum for cell in cells) - low for cells, low in zip(sizes, least, strict=True)]
    for served, i in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        more = min(needs[i], spare // (len(needs) - served))
        table.columns[i].width = least[i] + more
        spare -= more


def _paragraphs(table: Table, width: int) -> Iterator[str]:
    """Every row as lines ``head: cell``, the first cell before them; folded between words alone."""
    if table.title is not None:
        yield from _folded(str(table.title), width)
    heads = [str(column.header) for column in table.columns]
    for first, *cells in zip(*(column.cells for column in table.columns), strict=True):
        yield from _folded(f"{heads[0]} {first}".strip(), width)
        for head, cell in zip(heads[1:], map(str, cells), strict=True):
            if cell:
                yield from _folded(f"{head}: {cell}" if head else cell, width, "  ")
    yield ""


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=2 * indent, break_long_words=False, break_on_hyphens=False
    )


def print_measures(table: Measures) -> None:
    """A table of measurements; where the terminal is too narrow for it, with a column a recipe instead of a row."""
    from rich.text import Text

    out, wide = console(), table.to_rich()
    if _narrowest(out, wide) <= out.width:
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
