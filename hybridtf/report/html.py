"""The report: one HTML file that stands alone.

No outside address: the drawing code (Vega) is inside, once, and the page's own content security policy forbids every
fetch and every script but the two that the page was written with, so that text from a record could not become code
even where it was not escaped. Charts are drawn into the page as SVG as well: without scripts it shows the same.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hybridtf.core.files import atomic_file
from hybridtf.report import detail_tables, numbers, tables
from hybridtf.report import evidence as ev
from hybridtf.report.chart import Chart, to_svg
from hybridtf.report.charts import build_charts
from hybridtf.report.differences import difference_tables
from hybridtf.report.extras import need
from hybridtf.report.html_table import html_table
from hybridtf.report.inert_json import inert_json
from hybridtf.report.palette import Key, recipe_keys
from hybridtf.report.record_list import Links, record_list
from hybridtf.report.sentences import sentences
from hybridtf.report.stacks import stack_pictures
from hybridtf.report.table import Table

TITLE = "hybridtf report"
_SYMBOLS = {
    "circle": "M8 3.2a4.8 4.8 0 1 0 .01 0z",
    "square": "M3.5 3.5h9v9h-9z",
    "triangle-up": "M8 2.5 13.5 13h-11z",
    "diamond": "M8 2 13 8 8 14 3 8z",
    "cross": "M6.2 2.5h3.6v3.7h3.7v3.6H9.8v3.7H6.2V9.8H2.5V6.2h3.7z",
    "triangle-down": "M8 13.5 2.5 3h11z",
    "triangle-right": "M13.5 8 3 13.5v-11z",
}
_ENVIRONMENT = (
    ("os", "system"),
    ("cpu", "processor"),
    ("cores", "cores"),
    ("threads", "threads"),
    ("memory", "memory"),
    ("gpu", "GPU"),
    ("python", "Python"),
    ("torch", "torch"),
    ("hybridtf", "hybridtf"),
    ("plugins", "plugins"),
    ("commit", "commit"),
)


def write_report(records: Iterable[ev.Record], path: str | Path, title: str | None = None) -> Path:
    """Write the report of ``records`` to ``path``, whole or not at all, and give the path.

    Raises :class:`HybridTFError` where an extra is not installed or the file cannot be written.
    """
    records = list(records)
    target = Path(path)
    page = render_report(records, title or TITLE)
    with atomic_file(target) as temporary:
        temporary.write_bytes(page.encode(errors="replace"))  # half a surrogate pair has no UTF-8
    return target


def render_report(records: list[ev.Record], title: str) -> str:
    """The page as text."""
    jinja2, markup = need("jinja2"), need("markupsafe").Markup
    evidence, links = ev.gather(records), Links()
    charts = build_charts(evidence)
    listed = record_list(evidence, records)
    scripts = [_drawing_code(), _text("page.js")]
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = jinja2.Environment(**strict).from_string(_text("page.html.j2"))
    page: str = template.render(
        title=title,
        policy=_policy(scripts),
        style=markup(_text("page.css")),
        scripts=[markup(script) for script in scripts],
        specs=markup(inert_json({chart.name: chart.page_spec() for chart in charts})),
        records=markup(inert_json(records)),
        n_records=len(records),
        keys=[_key(key) for key in recipe_keys(evidence.labels)],
        sentences=sentences(evidence),
        comparisons=[html_table(table, links) for table in tables.compare_by_task(evidence)],
        details={name: html_table(table, links) for name, table in _details(evidence).items() if table.rows},
        differences=[html_table(table, links) for table in difference_tables(evidence)],
        charts=[_figure(chart, markup) for chart in charts],
        stacks=[{"label": picture.label, "svg": markup(picture.svg)} for picture in stack_pictures(evidence)],
        environments=_environments(evidence),
        kernels=_kernels(evidence),
        limits=_limits(evidence),
        reads_longer=evidence.reads_longer(),
        listed=listed,
        lists=[(name, sources) for sources, name in links.lists.items()],
        words={entry["id"]: entry["words"] for entry in listed},
    )
    return page


def _text(name: str) -> str:
    return resources.files("hybridtf.report").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _drawing_code() -> str:
    return _script_text(need("vl_convert").javascript_bundle())


def _figure(chart: Chart, markup: Any) -> dict[str, Any]:
    """A chart as the template wants it."""
    return {
        "name": chart.name, "section": chart.section, "title": chart.title, "caption": chart.caption,
        "keys": [_key(key) for key in chart.keys], "svg": markup(_inline(chart)),
    }


def _details(evidence: ev.Evidence) -> dict[str, Table]:
    return {
        "quality": detail_tables.quality_table(evidence),
        "extrapolation": detail_tables.extrapolation_table(evidence),
        "speed": detail_tables.speed_table(evidence),
        "memory": detail_tables.memory_table(evidence),
    }


def _key(key: Key) -> dict[str, Any]:
    return {"label": key.label, "colour": key.colour, "path": _SYMBOLS[key.shape] if key.shape else "M1 2h14v12h-14z"}


def _inline(chart: Chart) -> str:
    """The chart as SVG inside the page, its ids made its own."""
    spec = {**chart.page_spec(), "width": 720, "autosize": {"type": "fit-x", "contains": "padding"}}
    svg = re.sub(r'\bid="', f'id="{chart.name}-', to_svg(spec))
    return re.sub(r"url\(#", f"url(#{chart.name}-", svg)


def _script_text(script: str) -> str:
    """``script`` such that nothing in it ends or reopens its element."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _policy(scripts: Iterable[str]) -> str:
    """Nothing is fetched, and nothing runs but ``scripts``."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rules = ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _environments(evidence: ev.Evidence) -> list[dict[str, Any]]:
    """Each environment once, with the recipes and kinds of measurement that were made in it."""
    found: dict[str, dict[str, Any]] = {}
    for subject in evidence.subjects:
        for record in subject.records:
            environment = record.get("environment")
            if isinstance(environment, Mapping):
                entry = found.setdefault(
                    json.dumps(environment, sort_keys=True, default=str),
                    {"rows": _environment(environment), "made": {}},
                )
                entry["made"].setdefault(subject.label, {})[record["kind"]] = None
    return [
        {"rows": entry["rows"], "made": [f"{label}: {', '.join(kinds)}" for label, kinds in entry["made"].items()]}
        for entry in found.values()
    ]


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, label in _ENVIRONMENT:
        value = environment.get(name)
        if name == "memory" and ev.finite(value) is not None:
            text = numbers.in_bytes(float(value))  # type: ignore[arg-type]
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
        else:
            text = "none" if value is None else str(value)
        if name == "commit" and environment.get("dirty"):
            text += " (with changes that were not committed)"
        rows.append((label, text))
    return rows


def _kernels(evidence: ev.Evidence) -> list[dict[str, Any]]:
    """For each recipe, what each op ran in each phase; several sets where its records differ."""
    out = []
    for subject in evidence.subjects:
        rows = {
            (str(op), str(phase), str(kernel))
            for record in subject.records
            if isinstance(kernels := record.get("kernels"), Mapping)
            for op, phases in kernels.items()
            if isinstance(phases, Mapping)
            for phase, kernel in phases.items()
        }
        if rows:
            out.append({"label": subject.label, "rows": sorted(rows)})
    return out


def _limits(evidence: ev.Evidence) -> list[str]:
    """What the machines reached, as sentences."""
    found: dict[str, None] = {}
    for subject in evidence.subjects:
        for record in subject.of("speed"):
            matrix, copy = (ev.number(record, "floor", name) for name in ("matrix_flops_per_s", "copy_bytes_per_s"))
            if matrix is not None and copy is not None:
                threads = record.get("threads")
                with_threads = f" with {threads} thread{'s' if threads != 1 else ''}" if threads is not None else ""
                found[
                    f"Measured limits{with_threads}: {numbers.in_counts(matrix)}flop/s in a matrix product, "
                    f"{numbers.in_bytes(copy)}/s in a copy."
                ] = None
    return list(found)
