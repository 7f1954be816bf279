"""What charts are drawn with: scales, axes and layers of Vega-Lite, by altair. Rows come from ``chart_data``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from hybridtf.report.chart_data import Row
from hybridtf.report.extras import need
from hybridtf.report.palette import Key

Layers: TypeAlias = list[Any]

TOKENS = "format(datum.value, ',')"
"""A whole number with commas between thousands, as an axis label."""



def si(unit: str) -> str:
    """A number with an SI prefix and its unit, as an axis label."""
    return f"replace(format(datum.value, '~s'), regexp('([a-zA-Z\u00b5]?)$'), '\u202f$1{unit}')"


RECORD = ("record", "record", None)
"""The tooltip that names what a point comes from."""

STATE = "state of one sequence (bytes, log scale)"
GREY = "#808080"
INK = "#1a1a1a"
"""Text: the page gives what has this colour its own."""

ROW_STEP = 34
"""Pixels of height for each recipe in a chart with a row for each."""

_TICKS_PER_AXIS = 8
_FEWEST_TICKS = 3
_SYMBOLS_PER_LINE = 24


def drawn(rows: list[Row]) -> Any:
    """A chart of ``rows`` without marks yet."""
    return need("altair").Chart(need("altair").InlineData(values=rows))


def colour_of(keys: Sequence[Key]) -> Any:
    """The colours of the recipes."""
    scale = need("altair").Scale(domain=[key.label for key in keys], range=[key.colour for key in keys])
    return need("altair").Color(field="recipe", type="nominal", scale=scale)


def shape_of(keys: Sequence[Key]) -> Any:
    """The symbols of the recipes."""
    scale = need("altair").Scale(domain=[key.label for key in keys], range=[key.shape for key in keys])
    return need("altair").Shape(field="recipe", type="nominal", scale=scale)


def tooltips(*fields: tuple[str, str, str | None]) -> list[Any]:
    """(field, title, d3 number format or None for text)."""
    alt = need("altair")
    return [
        alt.Tooltip(field=name, type="quantitative", title=title, format=form)
        if form
        else alt.Tooltip(field=name, type="nominal", title=title)
        for name, title, form in fields
    ]


def log_ticks(values: Iterable[float]) -> list[float]:
    """Ticks around ``values``: powers of ten; where fewer than three fall among them, finer ones of two digits."""
    found = list(values)
    low, high = min(found) / 1.2, max(found) * 1.2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), [n / 10 for n in range(10, 100)]):
        ticks = [float(f"{step * 10.0**power:.2g}") for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= _FEWEST_TICKS:
            break
    return inside or found


def amount(field: str, title: str, *, from_zero: bool) -> Any:
    """A linear quantity along x."""
    alt = need("altair")
    axis = alt.Axis(
        labelOverlap="greedy",
        labelSeparation=8,
        tickCount=6,
        grid=True,
        labelExpr=TOKENS if from_zero else alt.Undefined,
    )
    scale = alt.Scale(zero=True, nice=True) if from_zero else alt.Scale(zero=False, nice=True, padding=8)
    return alt.X(field=field, type="quantitative", title=title, scale=scale, axis=axis)


def _recipes(order: Sequence[str]) -> Any:
    alt = need("altair")
    return alt.Y(
        field="recipe",
        type="nominal",
        title=None,
        sort=list(order),
        axis=alt.Axis(labelLimit=150, ticks=False, domain=False),
    )


def log2_axis(field: str, title: str, values: Iterable[float], label: str) -> Any:
    """A length or its multiple along x, with ticks among ``values``."""
    alt = need("altair")
    ticks = sorted(set(values))
    while len(ticks) > _TICKS_PER_AXIS:
        ticks = ticks[::2]
    axis = alt.Axis(values=ticks, labelExpr=label, labelOverlap="greedy", labelSeparation=8, grid=False)
    return alt.X(
        field=field,
        type="quantitative",
        title=title,
        scale=alt.Scale(type="log", base=2, nice=False, padding=10),
        axis=axis,
    )


def level_axis(title: str, field: str = "value", *, rate: bool = False) -> Any:
    """A quantity along y; a ``rate`` from zero."""
    alt = need("altair")
    axis = alt.Axis(tickCount=6, labelExpr=TOKENS) if rate else alt.Axis(tickCount=6)
    scale = alt.Scale(zero=True, nice=True) if rate else alt.Scale(zero=False, nice=True, padding=6)
    return alt.Y(field=field, type="quantitative", title=title, scale=scale, axis=axis)


def baseline(rows: list[Row], words: str, lowest: float) -> Layers:
    """A dashed line at each value, with its name; ``words`` name the score, ``lowest`` is where the chart begins without it."""
    alt = need("altair")
    if not rows:
        return []
    x = alt.X(field="value", type="quantitative")
    rule = drawn(rows).mark_rule(strokeDash=[5, 4], color=GREY, strokeWidth=1.5)
    # On the far side of the line from the axis: the names of the recipes stand left of the chart.
    first = all(row["value"] <= lowest for row in rows)
    side = {"align": "left", "dx": 5} if first else {"align": "right", "dx": -5}
    name = drawn(rows).mark_text(**side, baseline="top", fontSize=12, color=INK)
    tips = tooltips(("name", "baseline", None), ("value", words, ".3f"))
    return [
        rule.encode(x=x, tooltip=tips),
        name.encode(x=x, y=alt.value(2), text=alt.Text(field="name", type="nominal")),
    ]


def dots_in_rows(rows: list[Row], keys: Sequence[Key], x: Any, words: str) -> Layers:
    """One row a recipe: a symbol and its interval; ``words`` name the score."""
    alt = need("altair")
    y, colour = _recipes([key.label for key in keys]), colour_of(keys)
    tips = tooltips(
        ("recipe", "recipe", None),
        ("value", words, ".3f"),
        ("low", "from", ".3f"),
        ("high", "to", ".3f"),
        ("seeds", "seeds", "d"),
        RECORD,
    )
    base = drawn(rows)
    ends = {"x": alt.X(field="low", type="quantitative"), "x2": alt.X2(field="high")}
    return [
        base.mark_rule(strokeWidth=3, opacity=0.7).encode(y=y, color=colour, **ends),
        base.mark_point(filled=True, size=110, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape_of(keys), tooltip=tips
        ),
    ]


def log_amount(
    channel: Any, rows: list[Row], padding: int, field: str = "bytes", title: str = STATE, unit: str = "B"
) -> Any:
    """A quantity on a log scale, by default bytes of state, along ``channel`` (``alt.X`` or ``alt.Y``)."""
    alt = need("altair")
    ticks = log_ticks(row[field] for row in rows)
    axis = alt.Axis(values=ticks, labelExpr=si(unit), grid=True, labelOverlap="greedy", labelSeparation=8)
    scale = alt.Scale(type="log", nice=False, padding=padding)
    return channel(field=field, type="quantitative", title=title, scale=scale, axis=axis)


def curves(rows: list[Row], keys: Sequence[Key]) -> Layers:
    """Loss by tokens seen, a line for each recipe and seed."""
    alt = need("altair")
    axis = alt.Axis(
        labelExpr="format(datum.value, '~s')", tickCount=6, grid=False, labelOverlap="greedy", labelSeparation=8
    )
    x = alt.X(field="tokens", type="quantitative", title="tokens seen", axis=axis)
    tips = tooltips(
        ("recipe", "recipe", None),
        ("seed", "seed", None),
        ("tokens", "tokens", ","),
        ("loss", "loss (nats/token)", ".3f"),
        RECORD,
    )
    encoding = {
        "x": x,
        "y": level_axis("training loss (nats/token)", "loss"),
        "color": colour_of(keys),
        "detail": alt.Detail(field="seed", type="nominal"),
        "tooltip": tips,
    }
    lines = [drawn(rows).mark_line(strokeWidth=1.6, opacity=0.9).encode(**encoding)]
    points = Counter((row["recipe"], row["seed"]) for row in rows)
    alone = [row for row in rows if points[row["recipe"], row["seed"]] == 1]
    return lines + ([drawn(alone).mark_point(filled=True, size=60).encode(**encoding)] if alone else [])


def by_length(rows: list[Row], keys: Sequence[Key], field: str, x_title: str, y_title: str, label: str) -> Layers:
    """A line with symbols and a band for each recipe, over a length or its multiple (log 2)."""
    alt = need("altair")
    colour, x = colour_of(keys), log2_axis(field, x_title, (row[field] for row in rows), label)
    rate = y_title == "tokens/s"
    form = ",.0f" if rate else ".3f"
    tips = tooltips(
        ("recipe", "recipe", None),
        ("length", "tokens", ","),
        ("value", y_title, form),
        ("low", "from", form),
        ("high", "to", form),
        ("seeds", "seeds", "d"),
        RECORD,
    )
    y, low = level_axis(y_title, rate=rate), level_axis(y_title, "low", rate=rate)
    return [
        drawn(rows).mark_area(opacity=0.16).encode(x=x, y=low, y2=alt.Y2(field="high"), color=colour),
        drawn(rows).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        drawn(rows)
        .mark_point(filled=True, size=70, opacity=1)
        .encode(x=x, y=y, color=colour, shape=shape_of(keys), tooltip=tips),
    ]


def positions(rows: list[Row], keys: Sequence[Key], trained: list[Row]) -> Layers:
    """Loss by position (log 2), with a dashed line at each trained length."""
    alt = need("altair")
    low, high = min(row["position"] for row in rows), max(row["position"] for row in rows)
    powers = [2.0**p for p in range(math.floor(math.log2(max(low, 1))), math.ceil(math.log2(max(high, 1))) + 1)]
    ticks = [p for p in powers if low <= p <= high]
    x = log2_axis("position", "position in the document (tokens)", ticks or [low], TOKENS)
    tips = tooltips(
        ("recipe", "recipe", None),
        ("first", "from position", ","),
        ("last", "to position", ","),
        ("nats", "loss (nats/token)", ".3f"),
        ("tokens", "scored tokens", ","),
        RECORD,
    )
    y = level_axis("loss (nats/token)", "nats")
    line = {"x": x, "y": y, "color": colour_of(keys)}
    layers = (
        [
            drawn(trained)
            .mark_rule(strokeDash=[5, 4], color=GREY, strokeWidth=1.5)
            .encode(x=alt.X(field="length", type="quantitative"))
        ]
        if trained
        else []
    )
    many = len(rows) > _SYMBOLS_PER_LINE * len(keys)  # then they only answer the pointer
    points = drawn(rows).mark_point(filled=True, size=30, opacity=0 if many else 1).encode(**line, tooltip=tips)
    return [*layers, drawn(rows).mark_line(strokeWidth=1.8).encode(**line), points]


def states(rows: list[Row], keys: Sequence[Key]) -> Layers:
    """Bytes by length, both on log scales."""
    x = log2_axis("length", "tokens read", (row["length"] for row in rows), TOKENS)
    line = {"x": x, "y": log_amount(need("altair").Y, rows, 12), "color": colour_of(keys)}
    tips = tooltips(("recipe", "recipe", None), ("length", "tokens", ","), ("bytes", "state (bytes)", ","), RECORD)
    points = drawn(rows).mark_point(filled=True, size=80, opacity=1)
    return [
        drawn(rows).mark_line(strokeWidth=2).encode(**line),
        points.encode(**line, shape=shape_of(keys), tooltip=tips),
    ]


def bars(rows: list[Row], keys: Sequence[Key], title: str) -> Layers:
    """One bar a recipe with its spread and its number."""
    alt = need("altair")
    y, colour = _recipes([key.label for key in keys]), colour_of(keys)
    base = drawn(rows)
    tips = tooltips(
        ("recipe", "recipe", None),
        ("value", title, ",.0f"),
        ("low", "from", ",.0f"),
        ("high", "to", ",.0f"),
        ("seeds", "seeds", "d"),
        RECORD,
    )
    x = amount("value", title, from_zero=True)
    ends = {"x": alt.X(field="low", type="quantitative"), "x2": alt.X2(field="high")}
    return [
        base.mark_bar(height={"band": 0.62}).encode(x=x, y=y, color=colour, tooltip=tips),
        base.mark_rule(strokeWidth=2, color=GREY).encode(y=y, **ends),
    ]


def stacked(rows: list[Row], peaks: list[Row], keys: Sequence[Key], order: Sequence[str]) -> Layers:
    """Bytes by kind, stacked in one bar a recipe, and a tick at the measured peak."""
    alt = need("altair")
    y = _recipes(order)
    scale = alt.Scale(domain=[key.label for key in keys], range=[key.colour for key in keys])
    axis = alt.Axis(labelExpr=si("B"), tickCount=6, labelOverlap="greedy", labelSeparation=8)
    x = alt.X(field="bytes", type="quantitative", stack="zero", title="memory (bytes)", axis=axis)
    tips = tooltips(("recipe", "recipe", None), ("kind", "kind", None), ("bytes", "bytes", ","), RECORD)
    bar = (
        drawn(rows)
        .mark_bar(height={"band": 0.62}, stroke=GREY, strokeWidth=0.5)
        .encode(
            x=x,
            y=y,
            color=alt.Color(field="kind", type="nominal", scale=scale),
            order=alt.Order(field="order", type="quantitative"),
            tooltip=tips,
        )
    )
    if not peaks:
        return [bar]
    tick = (
        drawn(peaks)
        .mark_tick(thickness=3, color=GREY, height={"band": 0.95})
        .encode(
            x=alt.X(field="bytes", type="quantitative"),
            y=y,
            tooltip=tooltips(("recipe", "recipe", None), ("bytes", "measured peak (bytes)", ","), RECORD),
        )
    )
    return [bar, tick]
