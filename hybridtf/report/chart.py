"""One chart as Vega-Lite: for the page, where it answers to the pointer, and for a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridtf.report import evidence as ev
from hybridtf.report.extras import need
from hybridtf.report.palette import Key, recipe_keys

Spec: TypeAlias = dict[str, Any]

FILE_WIDTH = 600

_CONFIG: Spec = {
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelLimit": 150,
        "gridColor": "#80808040",
        "domainColor": "#808080",
        "tickColor": "#808080",
        "labelColor": "#1a1a1a",
        "titleColor": "#1a1a1a",
    },
    "legend": {"labelFontSize": 12, "labelLimit": 0, "orient": "bottom", "columns": 2, "title": None, "symbolSize": 90,
               "labelColor": "#1a1a1a", "titleColor": "#1a1a1a"},
    "title": {"anchor": "start", "fontSize": 14, "offset": 12},
}


@dataclass(frozen=True)
class Chart:
    """One chart: its file name, the section it stands in, its words, the keys of its legend, and its bare Vega-Lite."""

    name: str
    section: str
    title: str
    caption: str
    keys: tuple[Key, ...]
    spec: Spec

    def page_spec(self) -> Spec:
        """For a page that sets the width, the colour of text (see the page's style) and the legend."""
        config = {**_CONFIG, "legend": {"disable": True}}
        words = {"description": self._words(), "width": "container", "background": None}
        return {**_zoomable(self.spec), **words, "config": config}

    def file_spec(self) -> Spec:
        """For a file: its own width, white ground, title and legend."""
        return {
            **self.spec,
            "description": self._words(),
            "width": FILE_WIDTH,
            "background": "#ffffff",
            "title": self.title,
            "config": _CONFIG,
        }

    def _words(self) -> str:
        return f"{self.title}. {self.caption}"


def to_svg(spec: Spec) -> str:
    """Vega-Lite drawn as SVG, in this process and without a network."""
    version = ".".join(need("altair").SCHEMA_VERSION.lstrip("v").split(".")[:2])
    svg: str = need("vl_convert").vegalite_to_svg(spec, vl_version=version, allowed_base_urls=[])
    return svg


def make_chart(
    name: str, section: str, title: str, caption: str, keys: Sequence[Key], layers: Any, height: int = 300
) -> Chart:
    """A chart of altair's ``layers``."""
    spec = need("altair").layer(*layers).properties(height=height).to_dict()
    spec.pop("config", None)
    return Chart(name, section, title, caption, tuple(keys), spec)


def keys_of(evidence: ev.Evidence, rows: Sequence[dict[str, Any]]) -> list[Key]:
    """The keys of the recipes that a chart shows, with the colours that they have in all charts."""
    shown = {row["recipe"] for row in rows}
    return [key for key in recipe_keys(evidence.labels) if key.label in shown]


class TaskNames:
    """What charts of one task are called where records have several: the first, that of most recipes, needs no more."""

    def __init__(self, evidence: ev.Evidence) -> None:
        scored = [measure.task for measure in evidence.measures()]
        read = [ev.task_of(r) for s in evidence.subjects for kind in ("sweep", "extrapolation") for r in s.of(kind)]
        self._tasks = list(dict.fromkeys([*scored, *read]))

    def file(self, name: str, task: str) -> str:
        """The chart's name, unlike that of any other task."""
        if task == self._tasks[0]:
            return name
        slugs = [re.sub(r"[^A-Za-z0-9]+", "_", other).strip("_")[:40] for other in self._tasks]
        slug = slugs[self._tasks.index(task)]
        return f"{name}_{slug}" if slug and slugs.count(slug) == 1 else f"{name}_task{self._tasks.index(task) + 1}"

    def title(self, title: str, task: str) -> str:
        """The chart's title."""
        return title if len(self._tasks) < 2 else f"{title} ({task})"


# Only with a key held: the page itself scrolls by the wheel. A finger moves the page, not the chart.
_ZOOM = "wheel![event.ctrlKey || event.metaKey]"
_MOVE = "[pointerdown[event.pointerType !== 'touch'], window:pointerup] > window:pointermove!"


def _zoomable(spec: Spec) -> Spec:
    """The chart with axes of quantities that zoom and move; nothing is drawn beyond them then."""
    layers = spec.get("layer", [])
    axes = [[axis for axis in "xy" if _is_quantity(layer, axis)] for layer in layers]
    best = max(range(len(layers)), key=lambda i: len(axes[i]), default=None)
    if best is None or not axes[best]:
        return spec
    select = {"type": "interval", "encodings": axes[best], "zoom": _ZOOM, "translate": _MOVE}
    clipped = [{**layer, "mark": {**layer["mark"], "clip": True}} for layer in layers]
    clipped[best]["params"] = [{"name": "zoom", "select": select, "bind": "scales"}]
    return {**spec, "layer": clipped}


def _is_quantity(layer: Spec, axis: str) -> bool:
    return bool(layer.get("encoding", {}).get(axis, {}).get("type") == "quantitative")
