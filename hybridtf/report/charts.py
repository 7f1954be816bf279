"""The charts of a report, as Vega-Lite: in the page, and as SVG and PNG files.

Every chart exists only where records have something to show. A recipe has one colour and one symbol in all of them, so
that nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybridtf.core.files import atomic_file
from hybridtf.report import chart_data as data
from hybridtf.report import evidence as ev
from hybridtf.report import marks
from hybridtf.report.chart import Chart, keys_of, make_chart, to_svg
from hybridtf.report.extras import need
from hybridtf.report.length_charts import length_charts
from hybridtf.report.numbers import thousands
from hybridtf.report.palette import FILLS, Key
from hybridtf.report.quality_charts import quality_charts
from hybridtf.report.stacks import stack_pictures

PHASES = {"train": "training", "prefill": "prefill", "decode": "decode"}
PNG_SCALE = 2.0


def build_charts(evidence: ev.Evidence) -> list[Chart]:
    """All charts for which there are records, in the order of the page.

    Raises :class:`HybridTFError` where altair is not installed.
    """
    charts = [*quality_charts(evidence), *length_charts(evidence), _states(evidence)]
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


def _states(evidence: ev.Evidence) -> Chart | None:
    rows = data.state_rows(evidence)
    if not rows:
        return None
    keys = keys_of(evidence, rows)
    caption = "Bytes in use for one sequence, counted on states (1 kB = 1,000 bytes). A flat line is constant memory."
    return make_chart("state_by_length", "memory", "State by length", caption, keys, marks.states(rows, keys))


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
        keys = keys_of(evidence, same_batch)
        layers = marks.by_length(same_batch, keys, "length", what, "tokens/s", marks.TOKENS)
        return make_chart(
            f"speed_{phase}", "speed", title, f"Batch {condition[0]}; higher is better; {spread}.", keys, layers
        )
    rows = [row for row in same_batch if row["length"] == condition[1]]
    keys = keys_of(evidence, rows)
    after = "after a prompt of" if phase == "decode" else "x"
    caption = f"Batch {condition[0]} {after} {thousands(condition[1])} tokens; higher is better; {spread}."
    return make_chart(
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
    return make_chart(
        f"memory_{phase}", "memory", f"Memory: {PHASES[phase]}", caption, keys, layers, marks.ROW_STEP * len(order)
    )
