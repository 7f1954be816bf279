"""What a search leaves for people: the trials as a table, and the best stack as a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridtf.core import ConfigError
from hybridtf.core.files import atomic_file
from hybridtf.recipe import Recipe, to_toml
from hybridtf.search.run import Search, Trial

TRIALS, TABLE, BEST = "trials.json", "trials.md", "best.toml"


def best_recipe(search: Search, trials: Sequence[Trial]) -> Recipe:
    """The best trial's recipe, saying where it came from. Raises :class:`ConfigError` where every trial failed."""
    found = [trial for trial in trials if trial.score is not None]
    if not found:
        reasons = "; ".join(f"{t.stack.name}: {', '.join(t.failed.values())}" for t in trials[:3])
        raise ConfigError(f"no stack could be tried to its end: {reasons}")
    best = max(found, key=lambda trial: trial.score or 0.0)
    made = search.recipe(best.stack)
    tasks = ", ".join(f"{task} {score:.3f}" for task, score in best.by_task.items())
    said = (
        f"The best of {len(found)} stacks out of {len(search.space.stacks)} in {Path(search.space.source).name}, at "
        f"{search.n_params:,} parameters: score {best.score:.3f} on sides of the tasks kept to choose on ({tasks})."
    )
    meta = made.meta.model_copy(update={"title": best.stack.name, "description": said})
    return made.model_copy(update={"meta": meta}).resolved(seed=search.seed)


def trials_json(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Plain data, the best first."""
    return [{**asdict(trial), "stack": trial.stack.name} for trial in trials]


def trials_markdown(trials: Sequence[Trial]) -> str:
    """A table, the best first; a trial that failed has words and no number."""
    tasks = list(dict.fromkeys(task for trial in trials for task in (*trial.by_task, *trial.failed) if task))
    lines = [_row("stack", "score", *tasks, "trial"), "| --- |" + " ---: |" * (len(tasks) + 2)]
    for trial in trials:
        cells = [f"{trial.by_task[t]:.3f}" if t in trial.by_task else "failed" for t in tasks]
        score = "failed" if trial.score is None else f"{trial.score:.3f}"
        lines.append(_row(trial.stack.name, score, *cells, str(trial.number)))
    reasons = [f"- {t.stack.name}: {why}" for t in trials for why in dict.fromkeys(t.failed.values())]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])]) + "\n"


def write_outcome(folder: Path, trials: Sequence[Trial], best: Recipe) -> None:
    """``trials.json``, ``trials.md`` and ``best.toml``."""
    text = json.dumps(trials_json(trials), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    for name, content in ((TRIALS, text), (TABLE, trials_markdown(trials)), (BEST, to_toml(best))):
        with atomic_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
