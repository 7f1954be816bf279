"""The charts of what lies beyond the trained length. The trained length is said with each."""

from __future__ import annotations

from collections.abc import Iterable

from hybridtf.report import chart_data as data
from hybridtf.report import evidence as ev
from hybridtf.report import length_data, length_marks, marks
from hybridtf.report.chart import Chart, TaskNames, keys_of, make_chart
from hybridtf.report.numbers import thousands


def length_charts(evidence: ev.Evidence) -> list[Chart]:
    """All of them: of texts, then of recall, task by task."""
    names = TaskNames(evidence)
    charts = [_lengths(evidence), _positions(evidence)]
    for task in length_data.tasks(evidence):
        charts += [_recall(evidence, task, names), _distances(evidence, task, names), *_heat_maps(evidence, task, names)]
    return [chart for chart in charts if chart is not None]


def _said(lengths: Iterable[int]) -> str:
    """The trained lengths in words; the ratio of a length to it is what a multiple means."""
    known = [thousands(n) for n in sorted(set(lengths))]
    return f"trained length, {' or '.join(known)} tokens" if known else "trained length, which is not recorded"


def _trained(evidence: ev.Evidence, task: str | None = None) -> list[data.Row]:
    """``length`` at which the recipes were trained on a task (None: on texts), each once."""
    lengths = {n for subject in evidence.subjects for n in ev.trained_lengths(subject, task)}
    return [{"length": n} for n in sorted(lengths)]


def _lengths(evidence: ev.Evidence) -> Chart | None:
    rows = data.length_rows(evidence)
    if not rows:
        return None
    keys = keys_of(evidence, rows)
    caption = (
        "Bits per byte of the tokens between a multiple of the trained length and the one before; bands: 95 %. "
        f"1\u00d7 is the {_said(row['length'] for row in _trained(evidence))}."
    )
    layers = marks.by_length(
        rows, keys, "multiple", "multiple of the trained length", "bits per byte", "datum.value + '\u00d7'"
    )
    return make_chart("extrapolation", "extrapolation", "Beyond the trained length", caption, keys, layers)


def _positions(evidence: ev.Evidence) -> Chart | None:
    rows = data.position_rows(evidence)
    if not rows:
        return None
    keys = keys_of(evidence, rows)
    trained = _trained(evidence)
    caption = (
        "Mean loss of the tokens at each position of a document. The dashed line is the "
        f"{_said(row['length'] for row in trained)}."
    )
    layers = marks.positions(rows, keys, trained)
    return make_chart("loss_by_position", "extrapolation", "Loss by position", caption, keys, layers)


def _recall(evidence: ev.Evidence, task: str, names: TaskNames) -> Chart | None:
    rows, absent = length_data.recall_rows(evidence, task)
    if not rows:
        return None
    keys, trained, chance = keys_of(evidence, rows), _trained(evidence, task), length_data.chance_rows(rows)
    most = max((row["ratio"] for row in rows if row["ratio"] is not None), default=None)
    caption = f"Held-out accuracy by length; bands: 95 %. Dashed: the {_said(row['length'] for row in trained)}."
    caption += "" if most is None else f" The longest is {most:.4g}\u00d7."
    caption += " Dotted: guessing." if chance else ""
    caption += f" Without a number: {'; '.join(absent)}." if absent else ""
    layers = length_marks.recall(rows, chance, trained, keys)
    title = names.title("Recall by length", task)
    return make_chart(names.file("recall_by_length", task), "extrapolation", title, caption, keys, layers)


def _distances(evidence: ev.Evidence, task: str, names: TaskNames) -> Chart | None:
    rows = length_data.distance_rows(evidence, task)
    if not rows:
        return None
    keys, trained = keys_of(evidence, rows), _trained(evidence, task)
    caption = (
        "Accuracy by the distance of a target from where it was shown, over all lengths. "
        f"Dashed: the {_said(row['length'] for row in trained)}."
    )
    layers = length_marks.by_distance(rows, trained, keys)
    title = names.title("Recall by distance", task)
    return make_chart(names.file("recall_by_distance", task), "extrapolation", title, caption, keys, layers)


def _heat_maps(evidence: ev.Evidence, task: str, names: TaskNames) -> list[Chart]:
    """One a recipe, with one scale of colours."""
    charts = []
    for place, subject in enumerate(evidence.subjects, start=1):
        rows = length_data.depth_rows(subject, task)
        if any(row["value"] is not None for row in rows):
            trained = ev.trained_length(subject, task)
            caption = (
                f"Accuracy by length (and its multiple of the trained one) and by where in the row the answer was shown. "
                f"1\u00d7 is the {_said([] if trained is None else [trained])}. Dashed cells: nothing was asked there."
            )
            height = length_marks.CELL_HEIGHT * len({row["length"] for row in rows})
            name = names.file(f"recall_by_depth_{place}", task)
            title = names.title(f"Recall by length and depth: {subject.label}", task)
            charts.append(make_chart(name, "extrapolation", title, caption, [], length_marks.heat(rows), height))
    return charts
