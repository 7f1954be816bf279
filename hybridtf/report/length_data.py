"""Recall beyond the trained length: by length, by distance, by depth and length, as plain rows.

The fields are those of ``extrapolation`` records: ``by_length`` [{length, ratio, accuracy, interval, n_rows, chance,
result}], ``by_distance`` [[distance from, accuracy, n]] and ``grid`` {lengths, depths, accuracy, n}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from hybridtf.report import evidence as ev
from hybridtf.report import failures
from hybridtf.report.chart_data import interval, items, named
from hybridtf.report.measured import REF, read

Row: TypeAlias = dict[str, Any]


def tasks(evidence: ev.Evidence) -> list[str]:
    """The tasks whose recall was measured beyond the trained length, each once."""
    return list(dict.fromkeys(ev.task_of(r) for s in evidence.subjects for r in s.of("extrapolation") if _recalls(r)))


def _recalls(record: ev.Record) -> bool:
    return any(record.get(name) for name in ("by_length", "by_distance", "grid"))


def recall_rows(evidence: ev.Evidence, task: str) -> tuple[list[Row], list[str]]:
    """By length: ``recipe length ratio value low high seeds chance record``; and what has no number, with the word for it."""
    rows: list[Row] = []
    absent: list[str] = []
    for subject in evidence.subjects:
        found: dict[int, list[tuple[ev.Record, Mapping[str, Any]]]] = defaultdict(list)
        for record, entry in _entries(subject, task):
            if (length := ev.number(entry, "length")) is not None and length > 0:
                found[int(length)].append((record, entry))
        for length, at in sorted(found.items()):
            said = failures.summary([_outcome(entry) for _, entry in at])
            score = ev.over_seeds([read(e.get("accuracy"), r) for r, e in at], [ev.pair(e.get("interval")) for _, e in at])
            if said is not None:
                absent.append(f"{subject.label} at {length:,} tokens: {said}")
            elif score is not None:
                same = at[-1][1]
                rows.append({
                    "recipe": subject.label, "length": length, "ratio": ev.number(same, "ratio"),
                    "chance": ev.number(same, "chance"), **interval(score),
                })  # fmt: skip
    return rows, absent


def _entries(subject: ev.Subject, task: str) -> Iterator[tuple[ev.Record, Mapping[str, Any]]]:
    for record in subject.of("extrapolation"):
        by_length = record.get("by_length")
        if ev.task_of(record) == task and isinstance(by_length, list | tuple):
            yield from ((record, entry) for entry in by_length if isinstance(entry, Mapping))


def _outcome(entry: Mapping[str, Any]) -> str | None:
    result = entry.get("result")
    return None if result in (None, "ok") else failures.word(str(result)) or failures.CRASHED


def chance_rows(rows: Iterable[Row]) -> list[Row]:
    """What guessing reaches at each length: ``length value``."""
    found = {row["length"]: row["chance"] for row in rows if row["chance"] is not None}
    return [{"length": length, "value": found[length]} for length in sorted(found)]


def distance_rows(evidence: ev.Evidence, task: str) -> list[Row]:
    """By distance of a target from where it was shown, all seeds' targets together: ``recipe distance value n record``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        records = [r for r in subject.of("extrapolation") if ev.task_of(r) == task]
        sums: dict[float, tuple[float, float]] = {}
        for record in records:
            for item in items(record.get("by_distance")):
                start, accuracy, n = (ev.finite(value) for value in item) if len(item) == 3 else (None, None, None)
                if start is not None and accuracy is not None and n:
                    right, count = sums.get(start, (0.0, 0.0))
                    sums[start] = (right + accuracy * n, count + n)
        names = named([str(r[REF]) for r in records])
        rows += [
            {"recipe": subject.label, "distance": max(start, 1.0), "value": right / n, "n": int(n), "record": names}
            for start, (right, n) in sorted(sums.items())
        ]
    return rows


def depth_rows(subject: ev.Subject, task: str) -> list[Row]:
    """One recipe's recall by length and depth, all seeds' targets together: ``length ratio depth value n record``; of a cell
    in which nothing was asked, ``value`` is None."""
    records = [r for r in subject.of("extrapolation") if ev.task_of(r) == task and isinstance(r.get("grid"), Mapping)]
    sums: dict[tuple[float, float], tuple[float, float]] = {}
    trained = None
    for record in records:
        trained = ev.number(record, "trained_length") or trained
        for cell, accuracy, n in _cells(record["grid"]):
            right, count = sums.get(cell, (0.0, 0.0))
            sums[cell] = (right + accuracy * n, count + n)
    names = named([str(r[REF]) for r in records])
    return [
        {
            "length": int(length), "ratio": None if trained is None else length / trained, "depth": depth,
            "value": right / n if n else None, "n": int(n), "record": names,
        }
        for (length, depth), (right, n) in sorted(sums.items())
    ]  # fmt: skip


def _cells(grid: Mapping[str, Any]) -> Iterator[tuple[tuple[float, float], float, float]]:
    """((length, depth), accuracy, n) of every cell; n is 0 where nothing was asked."""
    lengths, depths = ([ev.finite(v) for v in grid.get(name) or ()] for name in ("lengths", "depths"))
    accuracy, counts = (items(grid.get(name)) for name in ("accuracy", "n"))
    for i, length in enumerate(lengths):
        for j, depth in enumerate(depths):
            if length is not None and depth is not None:
                right = ev.finite(accuracy[i][j]) if i < len(accuracy) and j < len(accuracy[i]) else None
                n = ev.finite(counts[i][j]) if i < len(counts) and j < len(counts[i]) else None
                yield (length, depth), right or 0.0, 0.0 if right is None or n is None else n
