"""Which of two recipes is faster: what the records say in their own verdicts, or, where they have none, by their intervals."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtf.report import evidence as ev


def faster(one: ev.Subject, two: ev.Subject, phase: str, condition: ev.Condition | None) -> bool:
    """Whether the records bear that ``one`` is faster than ``two`` in a phase.

    In a run every recipe has a verdict against the first. Two others are told apart where the intervals of their ratios to it
    are, and neither ratio was refused. Older records have no verdicts: there the intervals of the rates must be apart.
    """
    ours, theirs = ev.timed(one, phase, condition), ev.timed(two, phase, condition)
    ratios = [(_ratio(a), _ratio(b)) for a in ours for b in theirs if a.get("seed") == b.get("seed")]
    if any(ratio.get("verdict") or ratio.get("refused") for pair in ratios for ratio in pair):
        return all(_borne(ours[0], theirs[0], *pair) for pair in ratios)
    rates = ev.speed(one, phase, condition), ev.speed(two, phase, condition)
    if rates[0] is None or rates[1] is None or rates[0].overlaps(rates[1]) is not False:
        return False
    return rates[0].value > rates[1].value


def _borne(one: ev.Record, two: ev.Record, ours: ev.Record, theirs: ev.Record) -> bool:
    """The same of one run: ``ours`` and ``theirs`` are the ratios of the two records."""
    if ours.get("against") == two.get("recipe"):
        return bool(ours.get("verdict") == "faster")
    if theirs.get("against") == one.get("recipe"):
        return bool(theirs.get("verdict") == "slower")
    a, b = ev.pair(ours.get("interval")), ev.pair(theirs.get("interval"))
    same = ours.get("against") is not None and ours.get("against") == theirs.get("against")
    return same and not ours.get("refused") and not theirs.get("refused") and a is not None and b is not None and a[1] < b[0]


def _ratio(record: ev.Record) -> ev.Record:
    ratio = record.get("ratio")
    return ratio if isinstance(ratio, Mapping) else {}
