"""Arms of a comparison: an entrant on one task at one learning rate, with every option resolved before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from hybridtf.bench.cells import Cell
from hybridtf.bench.options import CompareOptions
from hybridtf.bench.subject import ModelFactory, Subject
from hybridtf.core import ConfigError, RecipeError, TaskConfig
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.tasks import Task
from hybridtf.train import TrainConfig, train_config
from hybridtf.train.foreign import ForeignModelConfig
from hybridtf.train.precision import DTYPES


@dataclass(frozen=True)
class Foreign:
    """An entrant that no recipe makes: ``build`` gives an ``nn.Module`` for a task (``subject.py`` says what it must answer),
    trained as ``train`` says, by the loop of all others. ``task``: its own, where the comparison names none."""

    build: ModelFactory
    train: TrainConfig
    task: TaskConfig | None = None


Entrant: TypeAlias = Recipe | Foreign


@dataclass
class Tasks:
    """Loaded tasks by name and config: loading a corpus takes a while. Only sides that no seed changes are used of them."""

    loaded: dict[tuple[str | None, str], Task] = field(default_factory=dict)

    def load(self, config: TaskConfig, name: str | None = None) -> Task:
        """The task, called ``name`` where one is given."""
        key = (name, repr(config))
        if key not in self.loaded:
            task: Task = copy.copy(config.load(0))
            task.name = name or task.name
            self.loaded[key] = task
        return self.loaded[key]


@dataclass(frozen=True)
class Arm:
    """``recipe`` has a task and its train section as a config; ``task_name``: what the comparison calls the task, None: as it
    calls itself. ``swept``: one of several learning rates, to be chosen between on the third side."""

    name: str
    task_name: str | None
    recipe: Recipe
    swept: bool
    device: str

    @property
    def config(self) -> TrainConfig:
        """How it is trained, but for the seed."""
        return train_config(self.recipe)

    @property
    def task(self) -> TaskConfig:
        """What it is trained on."""
        assert self.recipe.task is not None  # arms are made with one
        return self.recipe.task

    def trained_with(self, seed: int) -> Recipe:
        """The recipe as it is trained."""
        return self.recipe.model_copy(update={"train": self.config.model_copy(update={"seed": seed})})

    def subject(self, seed: int) -> Subject:
        """What records say of it, and how it is measured."""
        autocast = None if self.config.precision == "fp32" else DTYPES[self.config.precision]
        return Subject.from_recipe(self.trained_with(seed), self.name, seed=seed, device=self.device, autocast=autocast)

    @cached_property
    def recipe_hash(self) -> str:
        """Of the recipe, with its task and learning rate."""
        found = self.subject(0).recipe_hash
        assert found is not None  # it has a recipe
        return found

    def cell(self, seed: int) -> Cell:
        """Its training with one seed."""
        return Cell(self.name, self.recipe_hash, self.task_name or self.task.type_name(), seed, self.config.lr)


Group: TypeAlias = tuple[Arm, ...]
"""An entrant on one task: an arm for each learning rate."""


def groups_of(entrants: Mapping[str, Entrant], options: CompareOptions, tasks: Tasks) -> list[Group]:
    """Every entrant on every task, all of one task together.

    Raises :class:`RecipeError` for a missing section, and :class:`ConfigError` for a recipe that cannot be given a task, a task
    that keeps no third side though learning rates are to be chosen, and two entrants that are one.
    """
    named: list[tuple[str | None, TaskConfig | None]] = [(None, None)]
    if options.tasks is not None:
        named = list(options.tasks.items())
    return [
        _group(name, entrant, task_name, task, options, tasks)
        for task_name, task in named for name, entrant in entrants.items()
    ]


def _group(
    name: str, entrant: Entrant, task_name: str | None, task: TaskConfig | None, options: CompareOptions, tasks: Tasks
) -> Group:
    own = entrant.task
    if task is None and own is None:
        raise RecipeError(name, [("task", "there is no section [task]; a comparison needs one, or tasks of its own")])
    swept = len(options.learning_rates) > 1
    chosen = task or own
    assert chosen is not None
    if swept:
        chosen = _with_validation(name, chosen)
    recipe = _made(name, entrant, chosen, tasks.load(chosen, task_name), given=task is not None)
    config = _trained(train_config(recipe), options)
    rates = options.learning_rates or (config.lr,)
    arm = Arm(name, task_name, recipe, swept, str(options.chosen_device))
    return tuple(
        replace(arm, recipe=recipe.model_copy(update={"train": config.model_copy(update={"lr": rate})})) for rate in rates
    )


def _trained(config: TrainConfig, options: CompareOptions) -> TrainConfig:
    changes: dict[str, object] = {}
    if options.steps is not None:
        changes |= {"steps": options.steps, "tokens": None, "epochs": None}
    # The comparison measures quality itself, on every token.
    return config.model_copy(update=changes | {"eval_tokens": 0, "eval_every": None})


def _with_validation(name: str, task: TaskConfig) -> TaskConfig:
    if "validation" not in type(task).model_fields:
        raise ConfigError(
            f"{name}: the task {task.type_name()!r} has no option 'validation', so no learning rate can be chosen on it; "
            "give one"
        )
    return task.model_copy(update={"validation": True})


def _made(name: str, entrant: Entrant, config: TaskConfig, task: Task, *, given: bool) -> Recipe:
    """The entrant as a recipe of its own for the task. ``given``: the comparison names the task, and sizes follow from it."""
    if isinstance(entrant, Foreign):
        train = entrant.train
        if task.row_length is not None:
            train = train.model_copy(update={"seq_len": task.row_length})
        return Recipe(model=ForeignModelConfig.of(entrant.build, config, task), task=config, train=train)
    if not given:
        return entrant.model_copy(update={"task": config, "train": train_config(entrant)})
    fields = type(entrant.model).model_fields
    if "vocab_size" not in fields:
        raise ConfigError(
            f"{name}: a {entrant.model.type_name()!r} model has no vocab_size: it cannot be given the task {task.name!r}"
        )
    table = entrant.model_copy(update={"task": config, "train": train_config(entrant)}).to_dict()
    table["model"]["vocab_size"] = task.vocab_size
    if task.row_length is not None:
        table["train"]["seq_len"] = task.row_length
    longest = getattr(entrant.model, "max_seq_len", None)
    if longest is not None and longest < table["train"]["seq_len"]:
        raise ConfigError(
            f"{name}: model.max_seq_len = {longest} is less than the {table['train']['seq_len']} tokens of a row of the task "
            f"{task.name!r}; raise it, or leave it out"
        )
    return parse_recipe(table, name, sections={"train": TrainConfig})
