"""Why there is no number: out of memory, timed out, not finite and not run are four different answers, and none is zero.

A mean over the seeds of which one failed is refused: it would be the mean of those that went well.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from hybridtf.report.measured import REF, Measured, Record, number

OUT_OF_MEMORY, TIMED_OUT, NOT_FINITE, NOT_RUN, CRASHED = "out of memory", "timed out", "not finite", "not run", "crashed"


class Answer(str):
    """The word that stands in a table where a number would, with the records that say so."""

    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, records: Sequence[Record]) -> Answer:
        """``text``, said by ``records``."""
        answer = cls(text)
        answer.sources = tuple(str(record[REF]) for record in records if REF in record)
        return answer


# What harnesses and the errors that they catch say, in their order of precedence.
_SAID = (
    (re.compile(r"out.?of.?memory|\boom\b", re.IGNORECASE), OUT_OF_MEMORY),
    (re.compile(r"timed?.?out|time limit", re.IGNORECASE), TIMED_OUT),
    (re.compile(r"non.?finite|not finite|\bnan\b|\binf(inity)?\b", re.IGNORECASE), NOT_FINITE),
    (re.compile(r"not.?run\b", re.IGNORECASE), NOT_RUN),
)

# The number that a record of a kind is there for: without it, its note says why.
_MAIN = {"quality": "value", "speed": "tokens_per_s", "memory": "peak"}


def outcome(record: Record) -> str | None:
    """In one of the words of this file why ``record`` holds no result; None where it holds one, or says nothing."""
    if record.get("failed"):
        return word(str(record["failed"])) or CRASHED
    result = record.get("result")
    if isinstance(result, str) and result != "ok":
        return word(result) or CRASHED
    main = _MAIN.get(record["kind"])
    if main is None or number(record, main) is not None:
        return None
    value = record.get(main)
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE
    return word(str(record.get("note") or ""))


def word(text: str) -> str | None:
    """The word for what ``text`` says, or None."""
    return next((said for pattern, said in _SAID if pattern.search(text)), None)


def summary(outcomes: Sequence[str | None]) -> str | None:
    """One answer for several seeds, of which each has a word or None; None where none failed."""
    counts = Counter(said for said in outcomes if said is not None)
    if not counts:
        return None
    if len(counts) == 1 and counts.total() == len(outcomes):
        return next(iter(counts))
    return ", ".join(f"{said} in {n} of {len(outcomes)} seeds" for said, n in counts.items())


def told(measured: Measured | None, records: Sequence[Record]) -> Measured | str | None:
    """A cell: the number of ``records``, one a seed; where one of them failed, the word for it instead."""
    said = summary([outcome(record) for record in records])
    return measured if said is None else Answer.of(said, records)
