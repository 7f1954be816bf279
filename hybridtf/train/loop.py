"""The training loop. All it does lies in the recipe: two runs of one recipe are equal, killed and resumed or not.

Bit for bit on a CPU; on a GPU as far as the kernels in use are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hybridtf.core import CheckpointError, ConfigError
from hybridtf.recipe import Recipe
from hybridtf.train.checkpoint import RunFolder, read_recipe
from hybridtf.train.interrupt import StopSignals
from hybridtf.train.progress import Reporter, Style
from hybridtf.train.results import StepReport, TrainResult
from hybridtf.train.run import Run, step_of
from hybridtf.train.trainer_state import refuse_changes


def train(
    recipe: Recipe | None, out_dir: str | Path, *, device: torch.device | str | None = None, resume: bool = False,
    init_from: str | Path | None = None, progress: Style = "auto", on_step: Callable[[StepReport], None] | None = None,
) -> TrainResult:
    """Train ``recipe`` into the run folder ``out_dir``.

    ``resume``: continue the run in ``out_dir`` from its newest checkpoint (``recipe`` may be None then, or differ in
    how long and how often). ``init_from``: start from the weights of a run, checkpoint or model folder, with a fresh
    optimizer. ``device``: a GPU if there is one. torch's random states are left as they were.

    Raises :class:`Interrupted` after Ctrl-C and :class:`Terminated` after SIGTERM, with the step finished and saved;
    :class:`NonFiniteError` at the first loss or gradient that is not finite; :class:`CheckpointError`,
    :class:`ConfigError`, :class:`DataError` for wrong input.
    """
    folder = RunFolder(out_dir)
    if folder.path.exists() and not folder.path.is_dir():
        raise CheckpointError(f"{folder.path}: is a file; give a folder")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if resume and init_from is not None:
        raise ConfigError("resume continues a run and init_from starts one: give one of them")
    recipe = _recipe(recipe, folder, resume)
    with torch.random.fork_rng(devices=[chosen] if chosen.type == "cuda" else []):
        run = Run(recipe, folder, chosen, on_step)
        run.start(resume=resume, init_from=init_from)
        with Reporter(run.total, progress) as run.reporter, run.open_sinks(), StopSignals() as run.stop:
            return run.loop()


def _recipe(recipe: Recipe | None, folder: RunFolder, resume: bool) -> Recipe:
    if resume:
        stored = read_recipe(folder.checkpoint(), None if recipe is None else recipe.model)
        if recipe is None:
            return stored
        refuse_changes(stored, recipe, str(folder.path))
        return recipe
    if recipe is None:
        raise ConfigError("a new run needs a recipe")
    latest = folder.latest()
    if latest is not None and step_of(latest) > 0:
        raise CheckpointError(f"{folder.path}: holds a run already ({latest.name}); resume it or choose another folder")
    if foreign := folder.foreign():
        raise ConfigError(f"{folder.path}: holds {foreign}, and no run; choose an empty or a new folder")
    return recipe
