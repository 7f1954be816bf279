"""Folders of a model on disk: a bare model, a checkpoint of a run, and the run itself.

A model folder is ``{weights.safetensors, recipe.toml}``; weights too large for one file are
``model-00001-of-00002.safetensors`` and so on with ``model.safetensors.index.json``, as the field's tools have them. A
checkpoint adds ``trainer.safetensors`` and ``trainer.json``, and ``ema.safetensors`` where the run keeps an average: all
that a resumed run needs; no pickle is written or read. A run folder is ``{recipe.toml, parameters.json, log.jsonl,
checkpoints/}`` with ``checkpoints/step-00000100/`` and the file ``checkpoints/latest``, which names the newest. Every
folder appears whole or not at all, and an old checkpoint is removed only once a newer one is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, CheckpointError, HybridTFError, ModelConfig, RecipeError, nearest
from hybridtf.core.files import atomic_file, atomic_folder
from hybridtf.models.weights import (
    MAX_SHARD_BYTES,
    StoredTensors,
    assign_weights,
    canonical_tensors,
    is_stored,
    missing_files,
    read_weights,
    total_bytes,
    write_tensors,
)
from hybridtf.recipe import Recipe, parse_recipe, to_toml
from hybridtf.recipe.load import read_table
from hybridtf.train.average import assign_average
from hybridtf.train.config import TrainConfig
from hybridtf.train.foreign import ForeignModelConfig

WEIGHTS, SHARDED, RECIPE = "weights.safetensors", "model.safetensors", "recipe.toml"
TRAINER_TENSORS, TRAINER, EMA = "trainer.safetensors", "trainer.json", "ema.safetensors"
CHECKPOINTS, LATEST, PARAMETERS = "checkpoints", "latest", "parameters.json"
MODEL_FILES, TRAINER_FILES = (WEIGHTS, RECIPE), (TRAINER_TENSORS, TRAINER)

WhichWeights: TypeAlias = Literal["model", "ema"]
"""Those that were trained, or their exponential average."""

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A model from disk. ``step``: of the checkpoint, None for a bare model folder; ``path``: the folder it was in."""

    model: nn.Module
    recipe: Recipe
    step: int | None
    path: Path


# -- a model -----------------------------------------------------------------------------------------------------------


def save_model(
    model: nn.Module, recipe: Recipe, path: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the model folder ``path``, whole or not at all; weights of more than ``max_shard_bytes`` as several files.

    Raises :class:`CheckpointError` where the disk refuses or something else than a model is there.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and (is_stored(weights_path(path)) or not any(path.iterdir()))):
        raise CheckpointError(f"{path}: is there already and is no model folder; nothing was written")
    with atomic_folder(path) as temporary:
        _write_weights(model, temporary, max_shard_bytes)
        (temporary / RECIPE).write_text(to_toml(recipe), encoding="utf-8")


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
    weights: WhichWeights = "model", config: ModelConfig | None = None,
) -> nn.Module:
    """The model of a model, checkpoint or run folder; see :func:`load_run`."""
    return load_run(path, device=device, dtype=dtype, weights=weights, config=config).model


def load_run(
    path: str | Path, *, device: torch.device | str = "cpu", step: int | None = None, dtype: torch.dtype | None = None,
    weights: WhichWeights = "model", config: ModelConfig | None = None,
) -> LoadedRun:
    """The model of a run folder (its newest checkpoint, or that of ``step``), a checkpoint folder or a model folder.

    ``config``: of a model that a function builds, which the folder's recipe only names. ``weights = "ema"``: with the
    average that the run kept of its parameters. The model is in eval mode, in the dtype it was saved in or in ``dtype``.
    Raises :class:`CheckpointError` for what is missing, corrupt or does not fit.
    """
    folder = find_checkpoint(path, step)
    recipe = read_recipe(folder, config)
    file = weights_path(folder)
    tensors = read_weights(file)
    average = read_average(folder) if weights == "ema" else None
    context = BuildContext(d_model=0, device=torch.device(device), param_dtype=_main_dtype(tensors))
    try:
        model: nn.Module = recipe.model.build(context)
    except CheckpointError:
        raise
    except HybridTFError as error:
        raise CheckpointError(f"{folder / RECIPE}: its model cannot be built here: {error}") from error
    assign_weights(model, tensors, where=str(file))
    if average is not None:
        assign_average(model, average, where=str(folder / EMA))
    if dtype is not None:
        model.to(dtype)
    return LoadedRun(model.eval(), recipe, _step_of(folder), folder)


def weights_path(folder: Path) -> Path:
    """Where the weights of a model or checkpoint folder are, in one file or in several."""
    return folder / (SHARDED if is_stored(folder / SHARDED) and not (folder / WEIGHTS).is_file() else WEIGHTS)


def read_average(folder: Path) -> StoredTensors:
    """The average of a checkpoint; :class:`CheckpointError` where its run keeps none."""
    if not is_stored(folder / EMA):
        raise CheckpointError(f"{folder / EMA}: no such file; a run keeps an average of its weights with train.ema_decay")
    return read_weights(folder / EMA)


def read_recipe(folder: Path, config: ModelConfig | None = None) -> Recipe:
    """The recipe of a model or checkpoint folder, ``train`` as a :class:`TrainConfig`; or :class:`CheckpointError`.

    ``config``: of the model; where a function builds it (``ForeignModelConfig``) the file only says which one it was.
    """
    file = folder / RECIPE
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; a model folder holds {WEIGHTS} and {RECIPE}")
    try:
        table, where = read_table(file)
        if isinstance(config, ForeignModelConfig) and table.get("model") == config.to_dict():
            table["model"] = config
        return parse_recipe(table, where, sections={"train": TrainConfig})
    except RecipeError as error:
        where, message = error.faults[0]
        more = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
        raise CheckpointError(f"{file}: {f'{where}: ' if where else ''}{message}{more}") from error


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """The model or checkpoint folder that ``path`` means; raises :class:`CheckpointError` where there is none."""
    path = Path(path)
    if (path / CHECKPOINTS).is_dir():
        return RunFolder(path).checkpoint(step)
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        raise CheckpointError(f"{path}: no such folder{f'. Did you mean {str(path.parent / near)!r}?' if near else ''}")
    if not path.is_dir() or not ((path / RECIPE).is_file() or is_stored(weights_path(path))):
        raise CheckpointError(f"{path}: is no run, checkpoint or model folder (a model is {WEIGHTS} and {RECIPE})")
    if step is not None and step != _step_of(path):
        raise CheckpointError(f"{path}: is no run folder, so it has no step {step}")
    return path


def _main_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    found = Counter(t.dtype for t in tensors.values() if t.is_floating_point())
    return found.most_common(1)[0][0] if found else torch.float32


def _step_of(folder: Path) -> int | None:
    found = _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(".old"))
    in_run = folder.parent.name == CHECKPOINTS or (folder / TRAINER).is_file()
    return int(found[1]) if found and in_run else None


def _missing(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files that are not there; of tensors in several files those that their index names."""
    found: list[Path] = []
    for name in names:
        file = weights_path(folder) if name == WEIGHTS else folder / name
        tensors = file.suffix == ".safetensors"
        found += missing_files(file) if tensors else [] if file.is_file() else [file]
    return found


def _write_weights(model: nn.Module, folder: Path, max_shard_bytes: int) -> None:
    tensors = canonical_tensors(model)
    name = WEIGHTS if total_bytes(tensors) <= max_shard_bytes else SHARDED
    write_tensors(tensors, folder / name, max_shard_bytes=max_shard_bytes)


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds beside the model: ``data`` (JSON) and ``tensors``."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / CHECKPOINTS
        self.log = self.path / "log.jsonl"
        self.recipe = self.path / RECIPE

    def latest(self) -> Path | None:
        """The newest checkpoint whose model is whole, None where there is none.

        That is the one that the file ``latest`` names: raises :class:`CheckpointError` where a file of its model is
        missing, since an older one would be another model. Only a name of no folder is passed over.
        """
        while True:
            name = self._named()
            step, folders = _STEP.fullmatch(name), self._folders()
            found = folders.get(int(step[1])) if step else None
            if found is not None and not _missing(found, MODEL_FILES):
                return found
            if self._named() == name:
                break
            # A run that goes on has moved the pointer meanwhile, and may have removed what it named.
        if found is not None:
            return self._whole(found)
        # The pointer is written after the first checkpoint; a kill between the two leaves it missing.
        steps = [step for step, folder in folders.items() if not _missing(folder, MODEL_FILES)]
        return folders[max(steps)] if steps else None

    def _named(self) -> str:
        """What the file ``latest`` says; nothing where it is missing or unreadable."""
        try:
            return (self.checkpoints / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def find(self, step: int) -> Path | None:
        """The checkpoint of ``step`` with all that a resumed run needs, None where there is none."""
        folder = self._folders().get(step)
        return None if folder is None or _missing(folder, MODEL_FILES + TRAINER_FILES) else folder

    def checkpoint(self, step: int | None = None) -> Path:
        """The checkpoint of ``step``, or the newest, with its model whole; what a resumed run needs may be missing.

        Raises :class:`CheckpointError` naming the file that is missing, or the steps that are there.
        """
        folders = self._folders()
        found = self.latest() if step is None else folders.get(step)
        if found is None:
            have = ", ".join(map(str, sorted(folders))) or "none"
            which = "" if step is None else f" of step {step}"
            raise CheckpointError(f"{self.path}: has no checkpoint{which}. Steps: {have}")
        return self._whole(found)

    def save(
        self, step: int, model: nn.Module, recipe: Recipe, state: TrainerState,
        average: Mapping[str, Tensor] | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Path:
        """Write the checkpoint of ``step`` and point ``latest`` at it; older ones stay, see :meth:`prune`."""
        folder = self.checkpoints / f"step-{step:08d}"
        with atomic_folder(folder) as temporary:
            _write_weights(model, temporary, max_shard_bytes)
            write_tensors(state.tensors, temporary / TRAINER_TENSORS, max_shard_bytes=max_shard_bytes)
            if average is not None:
                write_tensors(average, temporary / EMA, max_shard_bytes=max_shard_bytes)
            (temporary / TRAINER).write_text(json.dumps(dict(state.data), allow_nan=False, indent=1), encoding="utf-8")
            (temporary / RECIPE).write_text(to_toml(recipe), encoding="utf-8")
        with atomic_file(self.checkpoints / LATEST) as temporary:
            temporary.write_text(f"{folder.name}\n", encoding="utf-8")
        return folder

    def prune(self, keep: int, newest: int) -> None:
        """Remove all but the ``keep`` last checkpoints up to step ``newest``."""
        for step in sorted(step for step in self._folders() if step <= newest)[:-keep]:
            self._remove(self.checkpoints / f"step-{step:08d}")

    def foreign(self) -> str:
        """What is in a folder that is not a run's, in words; nothing where it is empty or a run began there."""
        if not self.path.is_dir() or self.recipe.exists() or self.checkpoints.exists():
            return ""
        names = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        for leftover in self.checkpoints.glob(".*"):
            name = leftover.name.removeprefix(".")
            if name.startswith(f"{LATEST}."):
                leftover.unlink(missing_ok=True)
            elif _STEP.match(name) and leftover not in self._folders().values():
                shutil.rmtree(leftover, ignore_errors=True)

    def write_recipe(self, recipe: Recipe) -> None:
        with atomic_file(self.recipe) as temporary:
            temporary.write_text(to_toml(recipe), encoding="utf-8")

    def write_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Write ``parameters.json``: how each parameter is trained."""
        with atomic_file(self.path / PARAMETERS) as temporary:
            temporary.write_text(json.dumps(dict(parameters), indent=1) + "\n", encoding="utf-8")

    def _whole(self, folder: Path) -> Path:
        missing = _missing(folder, MODEL_FILES)
        if missing:
            others = [step for step, f in self._folders().items() if f != folder and not _missing(f, MODEL_FILES)]
            hint = f"; steps whose model is whole: {', '.join(map(str, sorted(others)))}" if others else ""
            raise CheckpointError(f"{missing[0]}: no such file, so this checkpoint cannot be used{hint}")
        return folder

    def _folders(self) -> dict[int, Path]:
        """Checkpoints by step. One that was being replaced when the run was killed lies under its old name."""
        found: dict[int, Path] = {}
        for folder in self.checkpoints.glob("*step-*"):
            name = folder.name
            old = name.startswith(".") and name.endswith(".old")
            match = _STEP.fullmatch(name.removeprefix(".").removesuffix(".old") if old else name)
            if match and folder.is_dir() and (not old or not folder.with_name(match[0]).exists()):
                found[int(match[1])] = folder
        return found

    def _remove(self, folder: Path) -> None:
        # Renamed first: a kill inside rmtree must not leave half a folder under a checkpoint's name.
        gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        try:
            os.replace(folder, gone)
        except OSError as error:
            raise CheckpointError(f"{folder}: an old checkpoint could not be removed ({error.strerror})") from error
        shutil.rmtree(gone, ignore_errors=True)


def read_trainer_state(folder: Path) -> TrainerState:
    """The trainer's part of a checkpoint; raises :class:`CheckpointError` where it is missing or corrupt."""
    file = folder / TRAINER
    missing = _missing(folder, TRAINER_FILES)
    if missing:
        raise CheckpointError(
            f"{missing[0]}: no such file; this folder holds a model, not a run that can be resumed. A new run can "
            "start from its weights"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != 1:
        raise CheckpointError(f"{file}: is not the trainer state of a checkpoint that this version can read")
    return TrainerState(data, read_weights(folder / TRAINER_TENSORS))
