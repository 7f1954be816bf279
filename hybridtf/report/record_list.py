"""The records of a page: one fold each, what leads to them, and lists of those that one number comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridtf.report import evidence as ev
from hybridtf.report import numbers, sifting
from hybridtf.report.inert_json import finite_json
from hybridtf.report.measured import REF, Record

MOST_ITEMS = 24
"""A longer list is abridged in the fold; the page's script shows it whole, and the download holds it."""


class Links:
    """Where the numbers of a page lead: to a record, or to a list of records, which is made when it is asked for."""

    def __init__(self) -> None:
        self.lists: dict[tuple[str, ...], str] = {}

    def to(self, sources: Sequence[str]) -> str | None:
        """The address within the page; None without sources."""
        if len(sources) < 2:
            return f"#{sources[0]}" if sources else None
        key = tuple(sources)
        return "#" + self.lists.setdefault(key, f"records-of-{len(self.lists) + 1}")


def record_list(evidence: ev.Evidence, records: Iterable[Any]) -> list[dict[str, Any]]:
    """Every record that counts: ``id``, ``words``, ``text`` (its JSON, abridged) and ``place`` (its index in
    ``records``, which the page holds whole)."""
    kept, _ = sifting.legible(records)
    places = {id(record): place for place, record in enumerate(records)}
    found = {sifting.named(record)[REF]: places[id(record)] for record in kept}
    return [
        {"id": record[REF], "words": _words(record), "text": _text(record), "place": found[record[REF]]}
        for subject in evidence.subjects for record in subject.records
    ]


def _words(record: Record) -> str:
    """What a record measured, on one line."""
    said = [str(record["kind"]), str(record["recipe"])]
    said += [str(record[name]) for name in ("task", "phase") if record.get(name) is not None]
    condition = ev.condition_of(record)
    said += [] if condition is None else [f"{numbers.thousands(condition[0])} x {numbers.thousands(condition[1])} tokens"]
    said += [f"{name} {record[name]}" for name in ("lr", "seed") if record.get(name) is not None]
    return sifting.readable(", ".join(said))


def _text(record: Record) -> str:
    return sifting.readable(json.dumps(finite_json(_abridged(record)), ensure_ascii=False, indent=1, default=str))


def _abridged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _abridged(item) for name, item in value.items() if name != REF}
    if not isinstance(value, list | tuple):
        return value
    if len(value) <= MOST_ITEMS:
        return [_abridged(item) for item in value]
    return [*map(_abridged, value[:3]), f"... {len(value) - 4} more ...", _abridged(value[-1])]
