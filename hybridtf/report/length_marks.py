"""How recall beyond the trained length is drawn: lines, and heat maps by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtf.report import marks
from hybridtf.report.extras import need
from hybridtf.report.length_data import Row
from hybridtf.report.palette import Key

CELL_HEIGHT = 30
"""Pixels for each length of a heat map."""

# Dark is wrong, light is right: rises evenly in lightness, so that it reads in grey and for colour-blind readers.
_SCHEME = "viridis"
INK_ON_LIGHT, INK_ON_DARK = "#101010", "#ffffff"
"""Numbers in cells: unlike other text they do not take the page's colour."""


def recall(rows: list[Row], chance: list[Row], trained: list[Row], keys: Sequence[Key]) -> marks.Layers:
    """Accuracy by length (log 2) with bands; dotted: guessing; dashed: the trained length."""
    alt = need("altair")
    x = marks.log2_axis("length", "length (tokens)", (row["length"] for row in rows), marks.TOKENS)
    tips = marks.tooltips(
        ("recipe", "recipe", None), ("length", "tokens", ","), ("ratio", "times the trained length", ".4~g"),
        ("value", "accuracy", ".3f"), ("low", "from", ".3f"), ("high", "to", ".3f"), ("seeds", "seeds", "d"), marks.RECORD,
    )
    y, low, colour = _share("value", "accuracy"), _share("low", "accuracy"), marks.colour_of(keys)
    layers = _trained(trained)
    if chance:
        line = marks.drawn(chance).mark_line(color=marks.GREY, strokeWidth=1.5, strokeDash=[2, 3])
        layers.append(line.encode(x=x, y=y))
    return [
        *layers,
        marks.drawn(rows).mark_area(opacity=0.16).encode(x=x, y=low, y2=alt.Y2(field="high"), color=colour),
        marks.drawn(rows).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        marks.drawn(rows).mark_point(filled=True, size=70, opacity=1).encode(
            x=x, y=y, color=colour, shape=marks.shape_of(keys), tooltip=tips
        ),
    ]


def by_distance(rows: list[Row], trained: list[Row], keys: Sequence[Key]) -> marks.Layers:
    """Accuracy by distance (log 2)."""
    title = "distance from what has to be recalled (tokens)"
    x = marks.log2_axis("distance", title, (row["distance"] for row in rows), marks.TOKENS)
    tips = marks.tooltips(
        ("recipe", "recipe", None), ("distance", "from distance", ","), ("value", "accuracy", ".3f"), ("n", "targets", ","),
        marks.RECORD,
    )
    line = {"x": x, "y": _share("value", "accuracy"), "color": marks.colour_of(keys)}
    points = marks.drawn(rows).mark_point(filled=True, size=60, opacity=1)
    return [
        *_trained(trained), marks.drawn(rows).mark_line(strokeWidth=2).encode(**line),
        points.encode(**line, shape=marks.shape_of(keys), tooltip=tips),
    ]


def heat(rows: list[Row]) -> marks.Layers:
    """A cell for each length (with its ratio to the trained one) and depth; empty where nothing was asked."""
    alt = need("altair")
    for row in rows:
        ratio = "" if row["ratio"] is None else f" ({row['ratio']:.3g}\u00d7)"
        row["row"], row["column"] = f"{row['length']:,}{ratio}", f"{100 * row['depth']:.3g}"
    lengths = [name for _, name in sorted({(r["length"], r["row"]) for r in rows})]
    depths = [name for _, name in sorted({(r["depth"], r["column"]) for r in rows})]
    x = alt.X(
        field="column", type="ordinal", title="depth of what has to be recalled (% of the row)", sort=depths,
        axis=alt.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap="greedy"),
    )
    y = alt.Y(field="row", type="ordinal", title=None, sort=lengths, axis=alt.Axis(ticks=False, domain=False))
    legend = alt.Legend(title="accuracy", orient="bottom", direction="horizontal", gradientLength=160,
                        titleColor=marks.INK, labelColor=marks.INK)  # fmt: skip
    colour = alt.Color(
        field="value", type="quantitative", scale=alt.Scale(scheme=_SCHEME, domain=[0, 1]), legend=legend,
    )
    tips = marks.tooltips(
        ("row", "length", None), ("column", "depth (%)", None), ("value", "accuracy", ".3f"), ("n", "targets", ","),
        marks.RECORD,
    )
    known = [row for row in rows if row["value"] is not None]
    layers = [marks.drawn(known).mark_rect().encode(x=x, y=y, color=colour, tooltip=tips)]
    empty = [row for row in rows if row["value"] is None]
    if empty:
        layers.append(marks.drawn(empty).mark_rect(filled=False, stroke=marks.GREY, strokeDash=[2, 3]).encode(x=x, y=y))
    if len(depths) <= 12:  # else the numbers do not fit their cells
        number = marks.drawn(known).mark_text(fontSize=11)
        ink = alt.condition("datum.value > 0.55", alt.value(INK_ON_LIGHT), alt.value(INK_ON_DARK))
        layers.append(number.encode(x=x, y=y, text=alt.Text(field="value", type="quantitative", format=".2f"), color=ink))
    return layers


def _trained(trained: list[Row]) -> marks.Layers:
    if not trained:
        return []
    rule = marks.drawn(trained).mark_rule(strokeDash=[5, 4], color=marks.GREY, strokeWidth=1.5)
    return [rule.encode(x=need("altair").X(field="length", type="quantitative"))]


def _share(field: str, title: str) -> Any:
    alt = need("altair")
    scale = alt.Scale(domain=[0, 1], nice=False)
    return alt.Y(field=field, type="quantitative", title=title, scale=scale, axis=alt.Axis(tickCount=6))
