"""Records: every measurement is one JSON line with its environment, and tables, plots and reports read nothing else.

The fields that every record has: ``schema``, ``kind``, ``recipe`` (a name), ``recipe_hash`` (null for a foreign model),
``pattern`` (one line), ``seed``, ``n_params``, ``kernels`` (op -> phase -> kernel), ``time`` (ISO 8601, UTC) and
``environment``. What each kind adds is written in the README of this room.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from hybridtf.bench.environment import environment
from hybridtf.bench.subject import Identity
from hybridtf.core import DataError, known_names

SCHEMA = 1
"""Grows when a field changes its meaning; new fields alone do not change it."""

KINDS = ("extrapolation", "fits", "kernel", "memory", "model", "quality", "speed", "sweep", "train")

COMMON = ("schema", "kind", "recipe", "recipe_hash", "pattern", "seed", "n_params", "kernels", "time", "environment")
"""The fields of every record, in the order in which they are written."""

Record: TypeAlias = dict[str, Any]


class Records(list[Record]):
    """The records of some files, in order. ``skipped``: lines that could not be read, where skipping was asked for."""

    skipped: int = 0


def make_record(kind: str, identity: Identity, fields: Mapping[str, Any]) -> Record:
    """A record of ``kind``: the common fields, measured here and now, then ``fields`` as plain JSON data.

    Raises :class:`DataError` for an unknown kind, a field that is common, or a value that JSON cannot hold.
    """
    if kind not in KINDS:
        raise DataError(f"no record kind {kind!r}. {known_names(kind, KINDS)}")
    taken = [name for name in fields if name in COMMON]
    if taken:
        raise DataError(f"record {kind!r}: the field {taken[0]!r} is one that every record has")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    common = {"schema": SCHEMA, "kind": kind, **identity.to_dict(), "time": now, "environment": environment()}
    record: Record = plain({**common, **fields}, kind)
    return record


def plain(value: Any, where: str = "record") -> Any:
    """``value`` as JSON data: numpy and torch scalars and arrays become numbers and lists.

    Raises :class:`DataError` naming the place of a NaN or an infinity (a number that could not be measured is None,
    and a ``note`` says why) or of a value that JSON cannot hold. """
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where}: {value} is no measurement; a record holds finite numbers, or null with a note")
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise DataError(f"{where}: a record cannot hold a {type(value).__name__}")


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one line to a file, which is made where it is missing.

    The line is written by one call to the end of the file and is on the disk when this returns; where the disk refuses,
    the file is as before and :class:`DataError` is raised. The unfinished last line of a writer that was killed is
    closed first, so that it costs nothing but itself.
    """
    path = Path(path)
    for field in COMMON:
        if field not in record:
            raise DataError(f"{path}: the record has no {field!r}")
    line = (json.dumps(plain(record), allow_nan=False, ensure_ascii=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _append(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(f"{path}: the record could not be written ({error.strerror or error})") from error


def _append(handle: int, line: bytes) -> None:
    size = os.fstat(handle).st_size
    if size and _read_last(handle, size) != b"\n":
        line = b"\n" + line
    try:
        written = os.write(handle, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted")
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, size)
        raise


def _read_last(handle: int, size: int) -> bytes:
    os.lseek(handle, size - 1, os.SEEK_SET)
    return os.read(handle, 1)


def read_records(paths: str | Path | Sequence[str | Path], *, skip_corrupt: bool = False) -> Records:
    """The records of one or more JSON Lines files, in order.

    A line that is no record raises :class:`DataError` with its file and number; with ``skip_corrupt`` it is left out
    and counted in ``skipped``. A missing file and a record of a newer schema always raise. """
    records = Records()
    for path in [paths] if isinstance(paths, str | Path) else paths:
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            fault = _fault(line, records)
            if fault is None:
                continue
            if not skip_corrupt:
                raise DataError(f"{path}, line {number}: {fault}")
            records.skipped += 1
    return records


def _fault(line: bytes, records: Records) -> str | None:
    """Why a line is no record; None: it was added."""
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"not a whole JSON object ({error})"
    if not isinstance(record, dict):
        return f"a record is a JSON object, not {type(record).__name__}"
    missing = [name for name in COMMON if name not in record]
    if missing:
        return f"the record has no {missing[0]!r}"
    if not isinstance(record["schema"], int) or record["schema"] > SCHEMA:
        raise DataError(f"a record has schema {record['schema']!r}; this version of hybridtf reads up to {SCHEMA}")
    records.append(record)
    return None


def select(records: Iterable[Record], kind: str, **fields: Any) -> list[Record]:
    """The records of ``kind`` whose fields have these values, in order."""
    return [r for r in records if r["kind"] == kind and all(r.get(name) == value for name, value in fields.items())]
