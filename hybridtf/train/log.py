"""``log.jsonl``: one JSON line a log step, evaluation and end; the source of every number that a run reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.core.files import atomic_file


class Log:
    """Appends to ``path``, which is made anew, or with ``after`` cut to the lines up to that step.

    A line that a kill tore is dropped too. ``found``: the lines that the step ``after`` has, by event.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        self.path, self.after = path, after
        kept = [] if after is None else [line for line in read_log(path) if line["step"] <= after]
        self.found = {str(line.get("event")): line for line in kept if line["step"] == after}
        self._rewrite(kept)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Add one line, in place of the one that ``found`` has of it, which is there until the new one is.

        Raises :class:`CheckpointError` where the disk refuses.
        """
        line = {"event": event, "step": step, **values}
        if step == self.after and event in self.found:
            kept = [other for other in read_log(self.path) if (other.get("event"), other["step"]) != (event, step)]
            self._rewrite([*kept, line])
            return
        try:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(_line(line))
        except OSError as error:
            raise CheckpointError(f"{self.path}: could not be written ({error.strerror or error})") from error

    def _rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        with atomic_file(self.path) as temporary:
            temporary.write_text("".join(_line(line) for line in lines), encoding="utf-8")


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, those torn by a kill left out; none where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as handle:
        for text in handle:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line
