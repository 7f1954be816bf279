"""The charts of a report, as Vega-Lite: in the page, and as SVG and PNG files.

Every chart exists only where records have something to show. A recipe has one colour and one symbol in all of them, so
that nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hybridtf.core.files import atomic_file
from hybridtf.report import chart_data as data
from hybridtf.report import evidence as ev
from hybridtf.report import marks
from hybridtf.report.extras import need
from hybridtf.report.numbers import thousands
from hybridtf.report.palette import FILLS, Key, recipe_keys
from hybridtf.report.stacks import stack_pictures

Spec: TypeAlias = dict[str, Any]

PHASES = {"train": "training", "prefill": "prefill", "decode": "decode"}
FILE_WIDTH = 600
PNG_SCALE = 2.0

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
    "legend": {"labelFontSize": 12, "labelLimit": 0, "orient": "bottom", "columns": 2, "title": None, "symbolSize": 90},
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
        return {**self.spec, "description": self._words(), "width": "container", "background": None, "config": config}

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


def build_charts(evidence: ev.Evidence) -> list[Chart]:
    """All charts for which there are records, in the order of the page.

    Raises :class:`HybridTFError` where altair is not installed.
    """
    makers: list[Callable[[ev.Evidence], Chart | None]] = [_quality, _tradeoff, _curves, _lengths, _positions, _states]
    charts = [maker(evidence) for maker in makers]
    charts += [_speed(evidence, phase) for phase in PHASES]
    charts += [_memory(evidence, phase) for phase in PHASES]
    return [chart for chart in charts if chart is not None]


def save_charts(records: Iterable[ev.Record], folder: str | Path) -> list[Path]:
    """Write every chart and every picture of a stack as ``NAME.svg`` and ``NAME.png``; gives the files in order.

    Raises :class:`HybridTFError` where altair or vl-convert-python is not installed or a file cannot be written.
    """
    convert = need("vl_convert")
    evidence = ev.gather(records)
    drawings = [(chart.name, to_svg(chart.file_spec())) for chart in build_charts(evidence)]
    drawings += [(picture.name, picture.file_svg()) for picture in stack_pictures(evidence)]
    written: list[Path] = []
    for name, svg in drawings:
        png = convert.svg_to_png(svg, scale=PNG_SCALE)
        for suffix, content in ((".svg", svg.encode()), (".png", png)):
            target = Path(folder) / (name + suffix)
            with atomic_file(target) as temporary:
                temporary.write_bytes(content)
            written.append(target)
    return written


def to_svg(spec: Spec) -> str:
    """Vega-Lite drawn as SVG, in this process and without a network."""
    version = ".".join(need("altair").SCHEMA_VERSION.lstrip("v").split(".")[:2])
    svg: str = need("vl_convert").vegalite_to_svg(spec, vl_version=version, allowed_base_urls=[])
    return svg


def _chart(name: str, section: str, title: str, caption: str, keys: list[Key], layers: Any, height: int = 300) -> Chart:
    spec = need("altair").layer(*layers).properties(height=height).to_dict()
    spec.pop("config", None)
    return Chart(name, section, title, caption, tuple(keys), spec)


def _keys(evidence: ev.Evidence, rows: list[data.Row]) -> list[Key]:
    """The keys of the recipes that a chart shows, with the colours that they have in all charts."""
    shown = {row["recipe"] for row in rows}
    return [key for key in recipe_keys(evidence.labels) if key.label in shown]


def _quality(evidence: ev.Evidence) -> Chart | None:
    rows, measure = data.quality_rows(evidence), evidence.measure()
    if not rows or measure is None:
        return None
    keys = _keys(evidence, rows)
    trivial = data.baseline_rows(evidence)
    x = marks.amount("value", f"held-out {measure.words} ({measure.better})", from_zero=False)
    lowest = min(row["value"] for row in rows)
    layers = [*marks.baseline(trivial, measure.words, lowest), *marks.dots_in_rows(rows, keys, x, measure.words)]
    caption = "Points with 95 % intervals."
    if trivial:
        bigram = trivial[0]["name"] == "bigram"
        caption += f" The dashed line is {'a model that only counts pairs of bytes' if bigram else 'the best trivial model'}."
    return _chart("quality", "quality", f"Held-out {measure.words}", caption, keys, layers, marks.ROW_STEP * len(keys))


def _tradeoff(evidence: ev.Evidence) -> Chart | None:
    rows, measure = data.tradeoff_rows(evidence), evidence.measure()
    if not rows or measure is None:
        return None
    keys = _keys(evidence, rows)
    lengths = sorted({row["length"] for row in rows})
    way = f"Left and {'up' if measure.higher_is_better else 'down'} is better."
    caption = f"{way} The bar across a large symbol is its 95 % interval."
    if len(lengths) == 2:
        caption = (
            f"Small hollow symbols: state after {thousands(lengths[0])} tokens; large: after {thousands(lengths[1])}, "
            f"with the 95 % interval of the score. {way}"
        )
    layers = marks.tradeoff(rows, keys, max(lengths), measure.words)
    return _chart("quality_by_state", "quality", "Quality against state", caption, keys, layers)


def _curves(evidence: ev.Evidence) -> Chart | None:
    rows = data.curve_rows(evidence)
    if not rows:
        return None
    keys = _keys(evidence, rows)
    most = max(row["steps"] for row in rows)
    caption = "Loss on the batches of training, one line a seed." + (
        f" Each point is the mean of up to {most} recorded steps." if most > 1 else ""
    )
    return _chart("training", "quality", "Training curves", caption, keys, marks.curves(rows, keys))


def _lengths(evidence: ev.Evidence) -> Chart | None:
    rows = data.length_rows(evidence)
    if not rows:
        return None
    keys = _keys(evidence, rows)
    caption = "Bits per byte of the tokens between a multiple of the trained length and the one before; bands: 95 %."
    layers = marks.by_length(
        rows, keys, "multiple", "multiple of the trained length", "bits per byte", "datum.value + '\u00d7'"
    )
    return _chart("extrapolation", "extrapolation", "Beyond the trained length", caption, keys, layers)


def _positions(evidence: ev.Evidence) -> Chart | None:
    rows = data.position_rows(evidence)
    if not rows:
        return None
    keys = _keys(evidence, rows)
    trained = data.trained_lengths(evidence)
    at = " or ".join(thousands(row["length"]) for row in trained)
    caption = (
        f"Mean loss of the tokens at each position of a document. The dashed line is the trained length ({at} tokens)."
    )
    return _chart(
        "loss_by_position", "extrapolation", "Loss by position", caption, keys, marks.positions(rows, keys, trained)
    )


def _states(evidence: ev.Evidence) -> Chart | None:
    rows = data.state_rows(evidence)
    if not rows:
        return None
    keys = _keys(evidence, rows)
    caption = "Bytes in use for one sequence, counted on states (1 kB = 1,000 bytes). A flat line is constant memory."
    return _chart("state_by_length", "memory", "State by length", caption, keys, marks.states(rows, keys))


def _speed(evidence: ev.Evidence, phase: str) -> Chart | None:
    condition = evidence.condition("speed", phase)
    rows = data.speed_rows(evidence, phase)
    if condition is None or not rows:
        return None
    title = f"Speed: {PHASES[phase]}"
    same_batch = [row for row in rows if row["batch_size"] == condition[0]]
    spread = "the spread is between the quartiles of the repeats of one seed, or the 95 % interval over several"
    if len({row["length"] for row in same_batch}) > 1:
        what = "prompt length (tokens)" if phase == "decode" else "length (tokens)"
        keys = _keys(evidence, same_batch)
        layers = marks.by_length(same_batch, keys, "length", what, "tokens/s", marks.TOKENS)
        return _chart(
            f"speed_{phase}", "speed", title, f"Batch {condition[0]}; higher is better; {spread}.", keys, layers
        )
    rows = [row for row in same_batch if row["length"] == condition[1]]
    keys = _keys(evidence, rows)
    after = "after a prompt of" if phase == "decode" else "x"
    caption = f"Batch {condition[0]} {after} {thousands(condition[1])} tokens; higher is better; {spread}."
    return _chart(
        f"speed_{phase}", "speed", title, caption, keys, marks.bars(rows, keys, "tokens/s"), marks.ROW_STEP * len(keys)
    )


def _memory(evidence: ev.Evidence, phase: str) -> Chart | None:
    condition = evidence.condition("memory", phase)
    rows = data.memory_rows(evidence, phase)
    if condition is None or not any(row["bytes"] for row in rows):
        return None
    shown = [kind for kind in data.MEMORY_KINDS if any(row["kind"] == kind and row["bytes"] for row in rows)]
    keys = [Key(kind, FILLS[data.MEMORY_KINDS.index(kind)]) for kind in shown]
    order = [label for label in evidence.labels if any(row["recipe"] == label for row in rows)]
    layers = marks.stacked([row for row in rows if row["kind"] in shown], data.peak_rows(evidence, phase), keys, order)
    caption = f"Batch {condition[0]} x {thousands(condition[1])} tokens. The grey tick is the measured peak."
    return _chart(
        f"memory_{phase}", "memory", f"Memory: {PHASES[phase]}", caption, keys, layers, marks.ROW_STEP * len(order)
    )
