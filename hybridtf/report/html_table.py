"""A table as the page's template wants it: every number a link to what it comes from, and with what it is sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtf.report.failures import Answer
from hybridtf.report.measured import Measured
from hybridtf.report.record_list import Links
from hybridtf.report.table import Cell, Column, Table


def html_table(table: Table, links: Links) -> dict[str, Any]:
    """``title heads rows notes``; cells have their interval apart, for a second line."""
    heads = [
        {"text": table.head(c).replace(" %", "\u00a0%"), "numeric": c.style != "text", "explanation": c.explanation}
        for c in table.columns
    ]
    rows = [[_cell(table, row, column, links) for column in table.columns] for row in table.rows]
    for cells in zip(*rows, strict=True):
        _align(cells)
    return {"title": table.title, "heads": heads, "rows": rows, "notes": table.notes}


def _cell(table: Table, row: dict[str, Cell], column: Column, links: Links) -> dict[str, Any]:
    cell = row.get(column.key)
    text, _, between = table.text(row, column, "\n").partition("\n")
    if column.style == "text" and cell is not None:  # a recipe's name may hold a line end of its own
        text, between = str(cell), ""
    number, sources = isinstance(cell, Measured), _sources(row, cell)
    return {
        "text": text,
        "interval": between,
        "missing": cell is None or (column.style != "text" and not number),
        "numeric": column.style != "text",
        "label": table.head(column),
        "sort": repr(cell.value) if isinstance(cell, Measured) else None,
        "href": links.to(sources) if column.style != "text" else None,
    }


def _align(cells: Sequence[dict[str, Any]]) -> None:
    """Invisible digits behind the numbers of a column, so that their decimal points stand in line."""
    most = max((_decimals(cell) for cell in cells), default=0)
    for cell in cells:
        lacks = most - _decimals(cell) if cell["sort"] is not None else 0
        cell["pad"] = ("." if lacks == most and most else "") + "0" * lacks


def _decimals(cell: dict[str, Any]) -> int:
    return len(cell["text"].partition(".")[2]) if cell["sort"] is not None else 0


def _sources(row: dict[str, Cell], cell: Cell) -> tuple[str, ...]:
    """What a cell comes from: all records of its row where a number is a condition of them, or is computed from several of
    their fields."""
    if isinstance(cell, Answer):
        return cell.sources
    if not isinstance(cell, Measured):
        return ()
    others = (source for other in row.values() if isinstance(other, Measured | Answer) for source in other.sources)
    return cell.sources or tuple(dict.fromkeys(others))
