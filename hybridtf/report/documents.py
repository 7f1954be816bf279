"""The tables as files for other documents: Markdown, and LaTeX to be read by ``\\input``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybridtf.core.files import atomic_file
from hybridtf.report import detail_tables, tables
from hybridtf.report import evidence as ev
from hybridtf.report.differences import difference_tables
from hybridtf.report.markup import markdown_text
from hybridtf.report.table import Table

PREAMBLE = "% Needs \\usepackage{booktabs} and \\usepackage{graphicx}; to be read by \\input. Written by hybridtf.\n"


def all_tables(evidence: ev.Evidence) -> list[Table]:
    """The comparison, and all others that have rows, in the order of the page."""
    details = [
        detail_tables.quality_table(evidence), *difference_tables(evidence), detail_tables.extrapolation_table(evidence),
        detail_tables.speed_table(evidence), detail_tables.memory_table(evidence),
    ]  # fmt: skip
    return [*tables.compare_by_task(evidence), *(table for table in details if table.rows)]


def write_markdown(records: Iterable[ev.Record], path: str | Path, title: str | None = None) -> Path:
    """Write all tables to ``path``, whole or not at all, a heading and a table each. Raises :class:`HybridTFError` where the
    file cannot be written."""
    parts = [f"# {markdown_text(title)}\n"] if title else []
    parts += [f"## {markdown_text(table.title)}\n\n{table.to_markdown()}" for table in all_tables(ev.gather(records))]
    return _write("\n".join(parts), path)


def write_latex(records: Iterable[ev.Record], path: str | Path) -> Path:
    """Write all tables to ``path``, whole or not at all, as floats with the labels ``tab:comparison``, ``tab:speed`` and so
    on. Raises :class:`HybridTFError` where the file cannot be written."""
    tables = all_tables(ev.gather(records))
    return _write("\n".join([PREAMBLE, *(table.to_latex(f"tab:{table.title.lower()}") for table in tables)]), path)


def _write(text: str, path: str | Path) -> Path:
    target = Path(path)
    with atomic_file(target) as temporary:
        temporary.write_bytes(text.encode(errors="replace"))  # half a surrogate pair has no UTF-8
    return target
