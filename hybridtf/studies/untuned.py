"""Trained weights in a recipe with other options, not trained again: what a change of positions alone does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from hybridtf.bench import CompareOptions, Record, Records, Subject, append_record, measure_extrapolation, read_records, select
from hybridtf.bench.comparison import RECORDS
from hybridtf.core import CheckpointError, ConfigError
from hybridtf.recipe import Recipe
from hybridtf.tasks import Task
from hybridtf.train import load_model, train_config


def measure_untuned(
    recipes: Mapping[str, Recipe], weights_of: Mapping[str, str], trained: Records, folder: Path, options: CompareOptions,
    say: Callable[[str], None] | None = None,
) -> Records:
    """``extrapolation`` records of ``recipes`` (by name), each with the weights of the recipe that ``weights_of`` gives for it.

    ``trained``: the records of those, whose runs are in ``folder``. Records are appended to those of ``folder``; one that is
    there already is not measured again, and a training that failed gives none. Each record has ``weights_of``, the name of
    the recipe that was trained. Raises :class:`ConfigError` where two recipes have not the same weights and for one without a
    task, :class:`CheckpointError` where a run is missing.
    """
    path, found = folder / RECORDS, Records()
    known = read_records(path, skip_corrupt=True) if recipes else Records()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tasks: dict[str, Task] = {}
    how = {"multiples": list(options.multiples), "max_documents": options.max_documents}
    for name, recipe in recipes.items():
        source = weights_of[name]
        for done in _latest(trained, source):
            subject = _subject(recipe, name, done["seed"], device)
            same = {"recipe": name, "recipe_hash": subject.recipe_hash, "seed": done["seed"], "weights_of": source, **how}
            before = select(known, "extrapolation", **same)
            if not before:
                if say is not None:
                    say(f"{name}, seed {done['seed']}: the weights of {source} beyond the trained length")
                model = _with_weights(subject, _run(folder, done), source)
                before = [_measure(subject, model, recipe, _task(recipe, name, tasks), options, source)]
                append_record(path, before[0])
            found.append(before[-1])
    return found


def _latest(trained: Records, recipe: str) -> Iterator[Record]:
    """The ``train`` record that counts of each seed, without those that failed."""
    latest = {record["seed"]: record for record in select(trained, "train", recipe=recipe)}
    return (record for record in latest.values() if not record.get("failed"))


def _subject(recipe: Recipe, name: str, seed: int, device: torch.device | str) -> Subject:
    config = train_config(recipe).model_copy(update={"seed": seed})
    return Subject.from_recipe(recipe.model_copy(update={"train": config}), name, seed=seed, device=device)


def _task(recipe: Recipe, name: str, tasks: dict[str, Task]) -> Task:
    """Recipes of one task share it: only its held-out side is read, which no seed changes."""
    if recipe.task is None:
        raise ConfigError(f"{name}: the recipe has no section [task]; there is nothing to read")
    key = repr(recipe.task)
    if key not in tasks:
        tasks[key] = recipe.task.load(0)
    return tasks[key]


def _run(folder: Path, trained: Record) -> Path:
    """The folder of a training: :func:`~hybridtf.bench.compare` names it by recipe, hash and seed."""
    ending = f"*-{trained['recipe_hash']}-seed{trained['seed']}"
    found = sorted((folder / "runs").glob(ending))
    if not found:
        raise CheckpointError(f"{folder / 'runs' / ending}: no such run; its weights are needed for {trained['recipe']}")
    return found[0]


def _with_weights(subject: Subject, run: Path, source: str) -> nn.Module:
    """The subject's model with the trained weights of another, which must have all of them and no more."""
    model = subject.build()
    weights = load_model(run).state_dict()
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    other = {name: tensor.shape for name, tensor in weights.items()}
    if own != other:
        unlike = sorted(name for name in own | other if own.get(name) != other.get(name))
        raise ConfigError(f"{subject.name} cannot take the weights of {source}: {unlike[0]} is not the same in both")
    model.load_state_dict(weights)
    return model.eval()


def _measure(
    subject: Subject, model: nn.Module, recipe: Recipe, task: Task, options: CompareOptions, source: str
) -> Record:
    config = train_config(recipe)
    record = measure_extrapolation(
        subject, model, task, trained_length=config.seq_len, multiples=options.multiples,
        batch_size=config.batch_size, max_documents=options.max_documents,
    )
    return {**record, "weights_of": source}
