"""The charts of quality: scores, what they cost, learning rates, training. Each task has its own."""

from __future__ import annotations

from hybridtf.report import chart_data as data
from hybridtf.report import evidence as ev
from hybridtf.report import front_data, front_marks, marks
from hybridtf.report.chart import Chart, TaskNames, keys_of, make_chart
from hybridtf.report.numbers import thousands


def quality_charts(evidence: ev.Evidence) -> list[Chart]:
    """All of them, task by task."""
    names = TaskNames(evidence)
    charts: list[Chart | None] = []
    for measure in evidence.measures():
        charts += [_scores(evidence, measure, names), *_fronts(evidence, measure, names)]
    charts += [_sweep(evidence, sweep, names) for sweep in front_data.sweeps(evidence)]
    charts.append(_curves(evidence))
    return [chart for chart in charts if chart is not None]


def _scores(evidence: ev.Evidence, measure: ev.Measure, names: TaskNames) -> Chart | None:
    rows = data.quality_rows(evidence, measure)
    if not rows:
        return None
    keys = keys_of(evidence, rows)
    trivial = data.baseline_rows(evidence, measure)
    x = marks.amount("value", f"held-out {measure.words} ({measure.better})", from_zero=False)
    lowest = min(row["value"] for row in rows)
    layers = [*marks.baseline(trivial, measure.words, lowest), *marks.dots_in_rows(rows, keys, x, measure.words)]
    caption = "Points with 95 % intervals."
    if trivial:
        bigram = trivial[0]["name"] == "bigram"
        caption += f" The dashed line is {'a model that only counts pairs of bytes' if bigram else 'the best trivial model'}."
    failed = [f"{s.label}: {said}" for s in evidence.subjects if (said := ev.quality_outcome(s, measure))]
    if failed:
        caption += f" Without a score: {'; '.join(failed)}."
    title = names.title(f"Held-out {measure.words}", measure.task)
    return make_chart(
        names.file("quality", measure.task), "quality", title, caption, keys, layers, marks.ROW_STEP * len(keys)
    )


def _fronts(evidence: ev.Evidence, measure: ev.Measure, names: TaskNames) -> list[Chart | None]:
    """Quality against state, operations of the training, and time of a decoded token."""
    way = f"Left and {'up' if measure.higher_is_better else 'down'} is better."
    steps = "The dotted steps are the front: what it passes nobody beats in both; the others are pale."
    state = front_data.state_rows(evidence, measure)
    lengths = sorted({row["length"] for row in state})
    of_state = f"State after {thousands(lengths[-1])} tokens" if lengths else ""
    if len(lengths) == 2:
        of_state += f"; small hollow symbols: after {thousands(lengths[0])}"
    condition = evidence.condition("speed", "decode")
    of_decode = f"Batch {condition[0]} after a prompt of {thousands(condition[1])} tokens" if condition else ""
    asked = (
        ("state", "state", (marks.STATE, "B"), state, of_state),
        ("flops", "training", ("operations of the training (FLOP, log scale)", "FLOP"),
         front_data.flops_rows(evidence, measure), "Operations are counted forward and backward"),
        ("decode", "decode time", ("time of a decoded token (s, log scale)", "s"),
         front_data.decode_rows(evidence, measure), of_decode),
    )  # fmt: skip
    charts: list[Chart | None] = []
    for name, words, axis, rows, how in asked:
        if rows:
            keys = keys_of(evidence, rows)
            longest = max((row.get("length", 0) for row in rows), default=0)
            front = front_data.front([r for r in rows if r.get("length", 0) == longest], measure.higher_is_better)
            layers = front_marks.fronts(rows, front, keys, axis, measure.words)
            title = names.title(f"Quality against {words}", measure.task)
            caption = f"{how}. {way} {steps} Bars: 95 % intervals of the score."
            charts.append(make_chart(names.file(f"quality_by_{name}", measure.task), "quality", title, caption, keys, layers))
    return charts


def _sweep(evidence: ev.Evidence, sweep: front_data.Sweep, names: TaskNames) -> Chart:
    measure, keys = sweep.measure, keys_of(evidence, sweep.rows)
    caption = f"{measure.words.capitalize()} by learning rate ({measure.better}); bands: 95 %."
    if any(row["chosen"] for row in sweep.rows):
        caption += " A ring: the rate that was chosen."
    if sweep.left_out:
        caption += f" Without a score: {'; '.join(sweep.left_out)}."
    layers = front_marks.by_rate(sweep.rows, keys, measure.words)
    title = names.title("Learning rates", measure.task)
    return make_chart(names.file("learning_rates", measure.task), "quality", title, caption, keys, layers)


def _curves(evidence: ev.Evidence) -> Chart | None:
    rows = data.curve_rows(evidence)
    if not rows:
        return None
    keys = keys_of(evidence, rows)
    most = max(row["steps"] for row in rows)
    caption = "Loss on the batches of training, one line a run." + (
        f" Each point is the mean of up to {most} recorded steps." if most > 1 else ""
    )
    return make_chart("training", "quality", "Training curves", caption, keys, marks.curves(rows, keys))
