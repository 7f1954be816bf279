"""A table as the page's template wants it: every number a link to what it comes from, and with what it is sorted by."""

from __future__ import annotations

from typing import Any

from hybridtf.report.measured import Measured
from hybridtf.report.record_list import Links
from hybridtf.report.table import Cell, Column, Table


def html_table(table: Table, links: Links) -> dict[str, Any]:
    """``title heads rows notes``; cells have their interval apart, for a second line."""
    heads = [{"text": table.head(c), "numeric": c.style != "text", "explanation": c.explanation} for c in table.columns]
    rows = [[_cell(table, row, column, links) for column in table.columns] for row in table.rows]
    return {"title": table.title, "heads": heads, "rows": rows, "notes": table.notes}


def _cell(table: Table, row: dict[str, Cell], column: Column, links: Links) -> dict[str, Any]:
    cell = row.get(column.key)
    text, _, between = table.text(row, column, "\n").partition("\n")
    if column.style == "text" and cell is not None:  # a recipe's name may hold a line end of its own
        text, between = str(cell), ""
    number = isinstance(cell, Measured)
    return {
        "text": text,
        "interval": between,
        "missing": cell is None or (column.style != "text" and not number),
        "numeric": column.style != "text",
        "label": table.head(column),
        "sort": repr(cell.value) if isinstance(cell, Measured) else None,
        "href": links.to(cell.sources or _of_row(row)) if isinstance(cell, Measured) else None,
    }


def _of_row(row: dict[str, Cell]) -> tuple[str, ...]:
    """All records of a row: where a number is a condition of them, or is computed from several of their fields."""
    return tuple(dict.fromkeys(s for cell in row.values() if isinstance(cell, Measured) for s in cell.sources))
