"""How quality against cost is drawn: the front as steps, what it beats muted; and scores by learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtf.report import marks
from hybridtf.report.extras import need
from hybridtf.report.front_data import Row
from hybridtf.report.palette import Key

MUTED = 0.4
"""Opacity of a recipe that another one beats in both."""


def fronts(rows: list[Row], front: list[Row], keys: Sequence[Key], x: tuple[str, str], words: str) -> marks.Layers:
    """Scores (``words`` name them) by ``cost``, with intervals; ``x`` is the title of its axis and its unit. Rows of a shorter
    length than the longest are hollow, joined to it by a thin line."""
    alt = need("altair")
    longest = max((row.get("length", 0) for row in rows), default=0)
    big, small = ([r for r in rows if (r.get("length", 0) == longest) is large] for large in (True, False))
    axis = marks.log_amount(alt.X, rows, 24, "cost", *x)
    y, colour = marks.level_axis(f"held-out {words}"), marks.colour_of(keys)
    lengths = [("length", "tokens", ",")] if longest else []
    tips = marks.tooltips(
        ("recipe", "recipe", None), *lengths, ("cost", x[0], ",.4~g"), ("value", words, ".3f"), ("seeds", "seeds", "d"),
        ("standing", "front", None), marks.RECORD,
    )
    for row in rows:
        on_it = any(row["recipe"] == other["recipe"] for other in front)
        row["standing"] = "nobody is better in both" if on_it else "another recipe is better in one and as good in the other"
    points = {"x": axis, "y": y, "color": colour, "shape": marks.shape_of(keys), "tooltip": tips}
    layers = [_steps(front, big, axis, y)]
    if small:
        layers.append(marks.drawn(rows).mark_line(strokeWidth=1.2, opacity=MUTED).encode(x=axis, y=y, color=colour))
        layers.append(marks.drawn(small).mark_point(filled=False, size=60, strokeWidth=1.8, opacity=1).encode(**points))
    ends = {"y": marks.level_axis(f"held-out {words}", "low"), "y2": alt.Y2(field="high")}
    best = {row["recipe"] for row in front}
    beaten = [row for row in big if row["recipe"] not in best]
    for part, opacity in ((beaten, MUTED), (front, 1.0)):
        if part:
            bars = marks.drawn(part).mark_rule(strokeWidth=2.5, opacity=0.6 * opacity)
            layers.append(bars.encode(x=axis, color=colour, **ends))
            layers.append(marks.drawn(part).mark_point(filled=True, size=130, opacity=opacity).encode(**points))
    return layers


def _steps(front: list[Row], all_rows: list[Row], x: Any, y: Any) -> Any:
    """What the best score is for at most so much cost, as far as the dearest recipe."""
    dearest = max(row["cost"] for row in all_rows)
    corners = [{"cost": row["cost"], "value": row["value"]} for row in front]
    corners.append({"cost": dearest, "value": front[-1]["value"]})
    line = marks.drawn(corners).mark_line(interpolate="step-after", color=marks.GREY, strokeWidth=1.5, strokeDash=[2, 2])
    return line.encode(x=x, y=y)


def by_rate(rows: list[Row], keys: Sequence[Key], words: str) -> marks.Layers:
    """Scores by learning rate; a ring around the one that was chosen."""
    alt = need("altair")
    ticks = sorted({row["lr"] for row in rows})
    axis = alt.Axis(values=ticks, labelExpr="format(datum.value, '.1~e')", grid=False, labelOverlap="greedy", labelSeparation=6)
    x = alt.X(
        field="lr", type="quantitative", title="learning rate (log scale)", axis=axis,
        scale=alt.Scale(type="log", nice=False, padding=16),
    )
    tips = marks.tooltips(
        ("recipe", "recipe", None), ("lr", "learning rate", ".3~g"), ("value", words, ".3f"), ("low", "from", ".3f"),
        ("high", "to", ".3f"), ("seeds", "seeds", "d"), marks.RECORD,
    )
    line = {"x": x, "y": marks.level_axis(words), "color": marks.colour_of(keys)}
    band = {"y": marks.level_axis(words, "low"), "y2": alt.Y2(field="high")}
    layers = [
        marks.drawn(rows).mark_area(opacity=0.16).encode(x=x, color=line["color"], **band),
        marks.drawn(rows).mark_line(strokeWidth=2).encode(**line),
        marks.drawn(rows).mark_point(filled=True, size=70, opacity=1).encode(**line, shape=marks.shape_of(keys), tooltip=tips),
    ]
    chosen = [row for row in rows if row["chosen"]]
    if chosen:
        layers.append(marks.drawn(chosen).mark_point(shape="circle", filled=False, size=320, strokeWidth=1.8).encode(**line))
    return layers
