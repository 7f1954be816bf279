"""A table: rows of plain numbers for programs, and the same for people in the terminal, in Markdown and in LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hybridtf.report import markup, numbers
from hybridtf.report.measured import Measured, sources

if TYPE_CHECKING:
    from rich.console import Group

Cell: TypeAlias = Measured | str | None
Style: TypeAlias = Literal["text", "count", "score", "rate", "bytes", "plain"]


@dataclass(frozen=True)
class Column:
    """A column: its key in plain rows, its head for people (without the unit; ``short`` in a terminal), and how its
    numbers are written.

    ``score``: bits per byte, with an interval under the number where ``with_interval``; ``rate``: tokens/s; ``bytes``
    and ``count``: one unit for the whole column; ``plain``: whole numbers.
    """

    key: str
    head: str
    style: Style = "text"
    with_interval: bool = False
    explanation: str = ""
    short: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key. ``notes`` say under which conditions the numbers were measured, ``missing`` what a
    cell that is None reads; in a column of numbers a text says why there is none (``failures.py``)."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Cell], ...]
    notes: tuple[str, ...] = ()
    missing: str = numbers.NOT_MEASURED
    _units: dict[str, tuple[str, float]] = field(init=False, repr=False, compare=False)
    _halves: dict[str, float | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_units", {column.key: self._unit(column) for column in self.columns})
        object.__setattr__(self, "_halves", {column.key: self._half(column) for column in self.columns})

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain rows for JSON: numbers in base units (bytes, tokens/s, bits per byte), None where nothing was measured,
        and the word for it where that failed.

        A column with an interval also gives ``KEY_low``, ``KEY_high`` and ``KEY_seeds``.
        """
        return [self._plain(row) for row in self.rows]

    def to_markdown(self) -> str:
        """The table in Markdown, with its notes below."""
        return markup.markdown(self._words(), self.notes)

    def to_latex(self, label: str) -> str:
        """The table as a float of LaTeX's with the rules of ``booktabs``; ``label`` is what ``\\ref`` finds it by."""
        return markup.latex(self._words(), self.title, label, self.notes)

    def _words(self) -> markup.Words:
        """Heads and cells as text, with which columns hold numbers."""
        rows = [[self.text(row, column, " ") for column in self.columns] for row in self.rows]
        heads = [(self.head(column), column.style != "text") for column in self.columns]
        return markup.Words(heads, rows)

    def to_rich(self) -> Group:
        """The table for the terminal: the comparison fits 100 columns. What no row has is named below it."""
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = [c for c in self.columns if c.style == "text" or any(row.get(c.key) is not None for row in self.rows)]
        absent = ", ".join(self.head(c) for c in self.columns if c not in shown)
        short = ["b/byte: bits per byte."] if any("b/byte" in c.short for c in shown) else []
        notes = [
            *self.notes,
            *short,
            *([f"{self.missing.capitalize()}: {absent}."] if absent and self.rows else []),
        ]
        table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
        for column in shown:
            words = [line for row in self.rows for line in self._lines(row, column).split("\n")]
            numeric = column.style != "text"
            head = (column.short or column.head) + "\n" + self._unit_words(column, "tok/s")
            table.add_column(
                Text(head.rstrip()),
                justify="right" if numeric else "left",
                vertical="top",
                overflow="fold",
                min_width=max([1, *map(len, words)]) if numeric else 8,
            )
        for row in self.rows:
            table.add_row(*(Text(self._lines(row, column)) for column in shown))
        return Group(Text(self.title, style="bold"), table, *(Text(note, style="dim") for note in notes))

    def head(self, column: Column) -> str:
        """The head of a column with its unit."""
        return f"{column.head} {self._unit_words(column, 'tokens/s')}".rstrip()

    def text(self, row: dict[str, Cell], column: Column, between: str = " ") -> str:
        """A cell for people; ``between`` stands before its interval."""
        cell = row.get(column.key)
        if cell is None or isinstance(cell, str):
            return self.missing if cell is None else cell
        if column.style == "plain":
            return numbers.thousands(cell.value)
        size, half = self._units[column.key][1], self._halves[column.key]
        places = numbers.places_of(cell.value / size, half)
        text = numbers.at_places(cell.value / size, places)
        if column.with_interval and cell.low is not None and cell.high is not None:
            to = numbers.TO if cell.low >= 0 else " to "  # a dash beside a minus is no reading
            return f"{text}{between}({numbers.interval(cell.low, cell.high, places, to)})"
        return text

    def _lines(self, row: dict[str, Cell], column: Column) -> str:
        """A cell of a narrow column."""
        text = self.text(row, column, "\n")
        return text.replace(" ", "\n") if column.style != "text" and not isinstance(row.get(column.key), Measured) else text

    def _unit_words(self, column: Column, rate: str) -> str:
        unit = rate if column.style == "rate" else self._units[column.key][0]
        return f"({unit})" if unit else ""

    def _half(self, column: Column) -> float | None:
        """What all numbers of a column are rounded by, so that they stand in line: its narrowest interval."""
        cells = [cell for row in self.rows if isinstance(cell := row.get(column.key), Measured)]
        halves = [cell.half for cell in cells if cell.half]
        return min(halves) if halves and column.style in ("score", "rate") else None

    def _unit(self, column: Column) -> tuple[str, float]:
        values = [cell.value for row in self.rows if isinstance(cell := row.get(column.key), Measured)]
        if column.style == "bytes":
            return numbers.byte_unit(values) if values else ("bytes", 1.0)
        return numbers.count_unit(values) if column.style == "count" else ("", 1.0)

    def _plain(self, row: dict[str, Cell]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for column in self.columns:
            cell = row.get(column.key)
            if not isinstance(cell, Measured):
                plain[column.key] = cell
            elif column.style in ("plain", "count", "bytes") and cell.value.is_integer():
                plain[column.key] = int(cell.value)
            else:
                plain[column.key] = cell.value
            if column.style in ("score", "rate"):
                measured = cell if isinstance(cell, Measured) else None
                plain[f"{column.key}_low"] = measured.low if measured else None
                plain[f"{column.key}_high"] = measured.high if measured else None
                plain[f"{column.key}_seeds"] = measured.n_seeds if measured else 0
        return plain


def exact(value: float | None) -> Measured | None:
    """A number that has no interval."""
    return None if value is None else Measured(float(value), sources=sources([value]))
