"""A study: recipes that are trained and measured side by side, and what their records show.

``run_study`` is :func:`hybridtf.bench.compare` over the study's recipes, and then ``Study.finding``, which reads records alone.
It leaves ``records.jsonl``, run folders, ``finding.json``, ``finding.md`` and, with the extra ``report``, ``report.html``. What
is there already is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridtf.bench import CompareOptions, Record, Records, compare
from hybridtf.core.files import atomic_file
from hybridtf.recipe import Recipe, load_recipe
from hybridtf.studies.claims import Finding
from hybridtf.studies.present import finding_markdown
from hybridtf.tasks import SyntheticConfig
from hybridtf.train import TrainConfig, train_config

FINDING, MARKDOWN, REPORT = "finding.json", "finding.md", "report.html"
SMOKE_STEPS = SMOKE_ROWS = 2

QUALITY = CompareOptions(speed_phases=(), memory_phases=(), progress="none")
"""Training, sizes of the model and the state, held-out quality by groups, and for text what lies beyond the trained length."""


@dataclass(frozen=True)
class Study:
    """One published finding, made small.

    ``paper``: who found it, with an address. ``recipes``: names of the TOML files in ``recipes/studies/NAME/``, each with its
    own task. ``finding``: a pure function of the records of :func:`~hybridtf.bench.compare`. ``smoke``: overrides
    (``path=value``) of a smoke run by recipe, the names being patterns such as ``"parity_*"``; fewer steps and fewer
    rows of drawn tasks need none. ``smoke_options``: the same for ``options``.
    """

    name: str
    title: str
    question: str
    paper: str
    recipes: tuple[str, ...]
    finding: Callable[[Sequence[Record]], Finding]
    seeds: int = 3
    options: CompareOptions = QUALITY
    smoke: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    smoke_options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, *, smoke: bool = False) -> dict[str, Recipe]:
        """The recipes by name. ``smoke``: as small as still runs through everything."""
        found = {}
        for name in self.recipes:
            overrides = [o for pattern, own in self.smoke.items() if fnmatchcase(name, pattern) for o in own] if smoke else []
            recipe = load_recipe(f"studies/{self.name}/{name}", overrides, sections={"train": TrainConfig})
            found[name] = _small(recipe) if smoke else recipe
        return found


@dataclass(frozen=True)
class StudyResult:
    """What a run of a study left in ``folder``."""

    study: Study
    folder: Path
    records: Records
    finding: Finding
    smoke: bool
    report: Path | None

    def last_trained(self) -> list[Record]:
        """The record that counts of each training: what failed was tried again."""
        return list({(r["recipe"], r["seed"]): r for r in self.records if r["kind"] == "train"}.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data: what ``finding.json`` holds."""
        study = {name: getattr(self.study, name) for name in ("name", "title", "question", "paper")}
        return {"study": study, "smoke": self.smoke, "seeds": _seeds_of(self.records), **self.finding.to_json()}


def run_study(
    study: Study, folder: str | Path, *, seeds: int | None = None, smoke: bool = False, workers: int = 1,
    say: Callable[[str], None] | None = None, report: bool = True,
) -> StudyResult:
    """Train and measure a study's recipes into ``folder`` and say what the records show.

    ``seeds``: how many instead of the study's (one in a smoke run). ``workers``: processes that train at once.
    ``report``: write ``report.html`` too, where its extra is installed. Raises what
    :func:`~hybridtf.bench.compare` raises; a recipe whose training failed leaves its claims not measured.
    """
    folder = Path(folder)
    count = seeds if seeds is not None else 1 if smoke else study.seeds
    options = replace(study.options, **study.smoke_options) if smoke else study.options
    records = compare(
        study.load(smoke=smoke), folder, seeds=range(count), options=replace(options, workers=workers), say=say
    )
    finding = study.finding(records)
    finding = finding.unmeasured() if smoke else finding
    result = StudyResult(study, folder, records, finding, smoke, _report(study, records, folder) if report else None)
    failed = [r for r in result.last_trained() if r.get("failed")]
    notes = [f"training of {r['recipe']}, seed {r['seed']}, failed: {r['failed']}" for r in failed]
    result = replace(result, finding=replace(finding, notes=(*finding.notes, *notes)))
    _write(folder / FINDING, json.dumps(result.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _write(folder / MARKDOWN, finding_markdown(study, records, result.finding, smoke=smoke))
    return result


def _small(recipe: Recipe) -> Recipe:
    """A few steps on a few rows; the sizes of rows keep their names, so that the finding meets all that it reads."""
    train = train_config(recipe)
    steps = min(train.steps or SMOKE_STEPS, SMOKE_STEPS)
    train = train.model_copy(update={"steps": steps, "tokens": None, "epochs": None, "warmup": 0.0, "batch_size": SMOKE_ROWS})
    task = recipe.task
    if isinstance(task, SyntheticConfig):
        few = {where: tuple(size.model_copy(update={"n_rows": min(size.n_rows, SMOKE_ROWS)}) for size in getattr(task, where))
               for where in ("train", "test")}
        task = task.model_copy(update=few)
    return recipe.model_copy(update={"train": train, "task": task})


def _report(study: Study, records: Records, folder: Path) -> Path | None:
    if not all(map(find_spec, ("altair", "vl_convert", "jinja2"))):
        return None
    from hybridtf.report import write_report

    return write_report(records, folder / REPORT, study.title)


def _seeds_of(records: Records) -> list[int]:
    return sorted({record["seed"] for record in records})


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
