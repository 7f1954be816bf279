"""A finding for people: Markdown for the README of a study, from the records and the finding alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hybridtf.bench.records import Record
from hybridtf.report.evidence import by_multiple, over_seeds
from hybridtf.studies.claims import Claim, Finding, Measures, Series

STATE_AT = 1024
"""Tokens after which the table gives the bytes of the state."""


class _Named(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def question(self) -> str: ...


def finding_markdown(study: _Named, records: Sequence[Record], finding: Finding, *, smoke: bool = False) -> str:
    """What was asked, every claim with its verdict, a table a task with what each recipe reached, and one of the loss along
    documents where that was measured."""
    measures = Measures(records)
    lines = [f"### {study.title}", "", study.question, ""]
    if smoke:
        lines += ["A smoke run: a few steps on a few rows. Its numbers say nothing.", ""]
    lines += [_row("claim", "expected", "mean", "95 % of the mean", "each seed", "verdict")]
    lines += ["| --- | --- | ---: | --- | --- | --- |"]
    lines += [_claim(claim) for claim in finding.claims]
    for task in _tasks(measures):
        lines += _tables(measures, task)
    lines += _beyond(measures)
    if finding.notes:
        lines += ["", *(f"- {note}" for note in finding.notes)]
    return "\n".join(lines) + "\n"


def _claim(claim: Claim) -> str:
    interval = "" if claim.interval is None else f"{claim.interval[0]:.3f} to {claim.interval[1]:.3f}"
    seeds = ", ".join(_number(value) for value in claim.by_seed.values())
    return _row(claim.statement, claim.expected, _number(claim.mean), interval, seeds, f"**{claim.verdict}**")


def _tasks(measures: Measures) -> list[str]:
    return list(dict.fromkeys(r["task"] for r in measures.records if r["kind"] == "quality"))


def _tables(measures: Measures, task: str) -> list[str]:
    """A table for each list of groups: a task's other sizes are other columns."""
    judged = [r for r in measures.records if r["kind"] == "quality" and r["task"] == task]
    by_groups: dict[tuple[str, ...], list[str]] = {}
    for recipe in dict.fromkeys(r["recipe"] for r in judged):
        by_groups.setdefault(tuple(measures.groups(recipe, task)), []).append(recipe)
    return [line for groups, recipes in by_groups.items() for line in ("", *_table(measures, judged, groups, recipes))]


def _table(measures: Measures, judged: Sequence[Record], names: Sequence[str], recipes: Sequence[str]) -> list[str]:
    """Rows: recipes; columns: the groups of rows that they were judged by, mean over seeds and the lowest and highest."""
    task = judged[0]["task"]
    groups: Sequence[str | None] = names or [None]
    heads = [group or str(judged[0]["metric"]).replace("_", " ") for group in groups]
    lines = [_row(task, *heads, "steps", "seconds", "parameters", f"state bytes at {STATE_AT:,}")]
    lines.append("| --- |" + " ---: |" * (len(heads) + 4))
    for recipe in recipes:
        cells = [_spread(measures.quality(recipe, group, task=task)) for group in groups]
        of = {"recipe_hash": next(r.get("recipe_hash") for r in reversed(judged) if r["recipe"] == recipe)}
        size = measures.state_bytes(recipe, STATE_AT)
        lines.append(_row(
            recipe, *cells, _spread(measures.series("train", recipe, lambda r: r["steps"], **of), "{:,.0f}"),
            _spread(measures.series("train", recipe, lambda r: r["seconds"], **of), "{:,.0f}"),
            f"{next(r['n_params'] for r in judged if r['recipe'] == recipe):,}", "" if size is None else f"{size:,}",
        ))
    return lines


def _beyond(measures: Measures) -> list[str]:
    """Rows: recipes whose loss along documents was measured; columns: the stretches of positions, mean over seeds and the
    lowest and highest."""
    read = [r for r in measures.records if r["kind"] == "extrapolation"]
    ends = {m: round(r["trained_length"] * m) for r in read for m in by_multiple(r, "bits_per_byte")}
    if not ends:
        return []
    lines = ["", _row("bits a byte, positions up to", *(f"{ends[m]:,}" for m in sorted(ends)))]
    lines.append("| --- |" + " ---: |" * len(ends))
    for recipe in dict.fromkeys(r["recipe"] for r in read):
        lines.append(_row(recipe, *(_spread(measures.beyond(recipe, m)) for m in sorted(ends))))
    return lines


def _spread(values: Series, style: str = "{:.3f}") -> str:
    known = [value for value in values.values() if value is not None]
    found = over_seeds(list(values.values()))
    if found is None:
        return "not measured"
    mean, low, high = (style.format(value) for value in (found.value, min(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
