"""Which records count: the later of two that agree in all that tells measurements apart, and none that cannot be read."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hybridtf.bench.records import KINDS, SCHEMA
from hybridtf.report.measured import REF, Record

# Characters that no XML, and so no SVG, can hold: controls and halves of surrogate pairs.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# What tells two measurements of one recipe apart; the later of two that agree in all of this counts.
_ALWAYS = ("kind", "recipe", "recipe_hash", "seed", "task", "lr")
_CONDITIONS = {
    "quality": ("metric",),
    "speed": ("phase", "batch_size", "length"),
    "kernel": ("op", "kernel", "phase", "batch_size", "length"),
    "memory": ("phase", "batch_size", "length"),
    "extrapolation": ("protocol",),
    "fits": ("phase", "batch_size", "limit_bytes"),
    "sweep": ("metric",),
}


def labels_of(groups: list[tuple[str, str]], tasks: list[list[str]]) -> list[str]:
    """The name alone where it is unique; else with its task, where each group of the name has one of its own; else with as
    much of the hash as tells them apart."""
    by_task = [
        f"{name} ({on[0]})" if _times(groups, name) > 1 and len(on) == 1 else name
        for (name, _), on in zip(groups, tasks, strict=True)
    ]
    if len(set(by_task)) == len(by_task):
        return by_task
    for shown in (0, 7, 64):
        labels = [
            name if shown == 0 or _times(groups, name) == 1 else f"{name} ({digest[:shown] or 'no hash'})"
            for name, digest in groups
        ]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{name} (recipe {i + 1})" for i, (name, _) in enumerate(groups)]


def _times(groups: list[tuple[str, str]], name: str) -> int:
    return sum(other == name for other, _ in groups)


def readable(text: str) -> str:
    """``text`` with a replacement character for what cannot be shown."""
    return _ILLEGAL.sub("\ufffd", text)


def legible(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """The records that can be shown, and a note on those that cannot."""
    kept: list[Record] = []
    refused: Counter[str] = Counter()
    for record in records:
        reason = _refusal(record)
        if reason is None:
            kept.append(record)
        else:
            refused[reason] += 1
    return kept, [
        f"{n} {'records were' if n > 1 else 'record was'} left out: {reason}." for reason, n in refused.items()
    ]


def _refusal(record: Any) -> str | None:
    """Why a record cannot be shown, or None."""
    if not isinstance(record, Mapping):
        return "no JSON object"
    schema = record.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        return f"schema {schema!r} is no version number"
    if schema > SCHEMA:
        return f"schema {schema} is newer than the {SCHEMA} that this version reads"
    if record.get("kind") not in KINDS:
        return f"unknown kind {record.get('kind')!r}"
    return None if isinstance(record.get("recipe"), str) else "it names no recipe"


def latest(records: list[Record]) -> list[Record]:
    """The records that count, in the order in which the recipes were first met."""
    last: dict[tuple[str, ...], Record] = {}
    for record in records:
        names = (*_ALWAYS, *_CONDITIONS.get(record["kind"], ()))
        key = tuple(repr(record.get(name)) for name in names)
        last[key] = record  # at the place of the first, so that measuring again does not reorder the recipes
    return list(last.values())


def machine_notes(records: Iterable[Record]) -> list[str]:
    """Speeds of different machines stand in one table: the reader must know."""
    machines = {
        tuple(str(environment.get(name)) for name in ("cpu", "gpu", "threads"))
        for record in records
        if record["kind"] == "speed" and isinstance(environment := record.get("environment"), Mapping)
    }
    return (
        ["Speeds were measured on different machines or thread counts, so they do not compare."]
        if len(machines) > 1
        else []
    )


def named(record: Record) -> Record:
    """A copy that holds its name under :data:`~hybridtf.report.measured.REF`.

    The name is an id in the page, in words that tell what was measured, and ends in a digest of the whole record.
    """
    words = (record["kind"], record["recipe"], record.get("task"), record.get("phase"), record.get("length"))
    said = [re.sub(r"[^A-Za-z0-9]+", "-", str(word))[:40].strip("-") for word in words if word is not None]
    seed = re.sub(r"[^A-Za-z0-9]+", "-", str(record.get("seed")))[:20]
    text = json.dumps(record, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:10]
    ref = "-".join([*filter(None, said), f"seed{seed}", digest])
    parts = {
        key: [{**item, REF: ref} if isinstance(item, Mapping) else item for item in value]
        for key, value in record.items() if isinstance(value, list) and key in _PARTS
    }
    return {**record, **parts, REF: ref}


_PARTS = ("by_length",)
"""Lists of objects whose numbers are asked for one by one: they know their record too."""
