"""The training loop. All it does lies in the recipe: two runs of one recipe are equal, killed and resumed or not.

Bit for bit on a CPU; on a GPU as far as the kernels in use are deterministic.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hybridtf.core import CheckpointError, ConfigError, NonFiniteError
from hybridtf.recipe import Recipe
from hybridtf.train.checkpoint import RunFolder, read_recipe
from hybridtf.train.interrupt import Interrupted, StopSignals
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
    optimizer. ``device``: a GPU if there is one. torch's random states are left as they were. A run whose first step raises
    leaves no folder.

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
        before = not resume and folder.latest() is not None
        with _undone_before_a_step(run):
            run.start(resume=resume, init_from=init_from)
            with Reporter(run.total, progress) as run.reporter, run.open_sinks(), StopSignals() as run.stop:
                if before:
                    run.reporter.say(f"{folder.path}: held a run of which no step was saved; it begins anew")
                return run.loop()


@contextmanager
def _undone_before_a_step(run: Run) -> Iterator[None]:
    """What raises before the first step is done takes with it what the run wrote, so that the folder can be used as before."""
    folder = run.folder.path
    was_there = folder.is_dir()
    mine = not was_there or not any(folder.iterdir())
    try:
        yield
    except (NonFiniteError, Interrupted):
        raise  # these name the checkpoint that they leave
    except Exception:
        if mine and run.counters.step == 0:
            _empty(folder, remove=not was_there)
        raise


def _empty(folder: Path, *, remove: bool) -> None:
    """A folder without what is in it, and ``remove`` it too. What cannot be removed stays: the fault to tell is the run's."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if remove:
            folder.rmdir()


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
