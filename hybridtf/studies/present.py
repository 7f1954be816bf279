"""A finding for people: Markdown for the README of a study, from the records and the finding alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hybridtf.bench.records import Record
from hybridtf.report.evidence import over_seeds
from hybridtf.studies.claims import Claim, Finding, Measures, Series

STATE_AT = 1024
"""Tokens after which the table gives the bytes of the state."""


class _Named(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def question(self) -> str: ...


def finding_markdown(study: _Named, records: Sequence[Record], finding: Finding, *, smoke: bool = False) -> str:
    """What was asked, every claim with its verdict, and a table a task with what each recipe reached."""
    measures = Measures(records)
    lines = [f"### {study.title}", "", study.question, ""]
    if smoke:
        lines += ["A smoke run: a few steps on a few rows. Its numbers say nothing.", ""]
    lines += [_row("claim", "expected", "mean", "95 % of the mean", "each seed", "verdict")]
    lines += ["| --- | --- | ---: | --- | --- | --- |"]
    lines += [_claim(claim) for claim in finding.claims]
    for task in _tasks(measures):
        lines += ["", *_table(measures, task)]
    if finding.notes:
        lines += ["", *(f"- {note}" for note in finding.notes)]
    return "\n".join(lines) + "\n"


def _claim(claim: Claim) -> str:
    interval = "" if claim.interval is None else f"{claim.interval[0]:.3f} to {claim.interval[1]:.3f}"
    seeds = ", ".join(_number(value) for value in claim.by_seed.values())
    return _row(claim.statement, claim.expected, _number(claim.mean), interval, seeds, f"**{claim.verdict}**")


def _tasks(measures: Measures) -> list[str]:
    return list(dict.fromkeys(r["task"] for r in measures.records if r["kind"] == "quality"))


def _table(measures: Measures, task: str) -> list[str]:
    """Rows: recipes that were judged by ``task``; columns: its groups, mean over seeds and the lowest and highest."""
    judged = [r for r in measures.records if r["kind"] == "quality" and r["task"] == task]
    recipes = list(dict.fromkeys(r["recipe"] for r in judged))
    groups: list[str | None] = list(dict.fromkeys(group for recipe in recipes for group in measures.groups(recipe)))
    groups = groups or [None]
    heads = [group or str(judged[0]["metric"]).replace("_", " ") for group in groups]
    lines = [_row(task, *heads, "steps", "seconds", "parameters", f"state bytes at {STATE_AT:,}")]
    lines.append("| --- |" + " ---: |" * (len(heads) + 4))
    for recipe in recipes:
        cells = [_spread(measures.quality(recipe, group)) for group in groups]
        size = measures.state_bytes(recipe, STATE_AT)
        lines.append(_row(
            recipe, *cells, _spread(measures.series("train", recipe, lambda r: r["steps"]), "{:,.0f}"),
            _spread(measures.series("train", recipe, lambda r: r["seconds"]), "{:,.0f}"),
            f"{next(r['n_params'] for r in judged if r['recipe'] == recipe):,}", "" if size is None else f"{size:,}",
        ))
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
