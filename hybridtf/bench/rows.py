"""The rows of a comparison's table, read from records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridtf.bench.records import Record, select


@dataclass(frozen=True)
class Row:
    """One recipe. A number is the mean over the seeds, None where it was not measured.

    ``bits_per_byte`` on held-out text with its ``interval`` (of the one seed; None for several) beside ``bigram``'s;
    tokens a second; ``peak_bytes`` of a training step; ``state_bytes`` by number of tokens; ``bits_at`` by multiple of
    the trained length; ``failed``: why training ended early. """

    name: str
    pattern: str | None = None
    n_params: int | None = None
    bits_per_byte: float | None = None
    interval: tuple[float, float] | None = None
    bigram: float | None = None
    train_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    peak_bytes: float | None = None
    state_bytes: dict[int, int] = field(default_factory=dict)
    bits_at: dict[int, float | None] = field(default_factory=dict)
    failed: str | None = None


def rows_of(records: Sequence[Record], recipes: Iterable[tuple[str, str | None]]) -> list[Row]:
    """A row for each (recipe, recipe_hash), in that order; of two records about the same thing the later one counts."""
    of = {key: [r for r in records if (r["recipe"], r["recipe_hash"]) == key] for key in recipes}
    return [_row(key[0], found) for key, found in of.items()]


def _row(name: str, records: Sequence[Record]) -> Row:
    quality = _by_seed(select(records, "quality"))
    models = select(records, "model")
    failed = [r["failed"] for r in _by_seed(select(records, "train")) if r.get("failed")]
    single = quality[0].get("interval") if len(quality) == 1 else None
    return Row(
        name, pattern=_last(records, "pattern"), n_params=_last(records, "n_params"),
        bits_per_byte=_mean([r["value"] for r in quality]), interval=(single[0], single[1]) if single else None,
        bigram=_mean([r["baselines"].get("bigram") for r in quality]),
        train_tokens_per_s=_last(select(records, "speed", phase="train"), "tokens_per_s"),
        decode_tokens_per_s=_last(select(records, "speed", phase="decode"), "tokens_per_s"),
        peak_bytes=_last(select(records, "memory", phase="train"), "peak"),
        state_bytes=_state_bytes(models), bits_at=_bits_at(_by_seed(select(records, "extrapolation"))),
        failed=failed[0] if failed else None,
    )


def _by_seed(records: Sequence[Record]) -> list[Record]:
    return list({r["seed"]: r for r in records}.values())


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _last(records: Sequence[Record], name: str) -> Any:
    return records[-1][name] if records else None


def _state_bytes(models: Sequence[Record]) -> dict[int, int]:
    sizes = models[-1]["state_bytes"] if models else None
    return {int(length): size["allocated"] for length, size in (sizes or {}).items()}


def _bits_at(records: Sequence[Record]) -> dict[int, float | None]:
    found: dict[int, list[float | None]] = {}
    for record in records:
        for multiple, bits in zip(record["multiples"], record["bits_per_byte"], strict=True):
            found.setdefault(multiple, []).append(bits)
    return {multiple: _mean(values) for multiple, values in sorted(found.items())}
