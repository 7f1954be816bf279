"""One trial: a stack at equal parameters, trained on every task, and scored.

``Evaluate`` is the seam for an engine: a function of a name and a recipe to records. ``Evaluation`` is that of
:func:`hybridtf.bench.compare`, whose own engine may run the trainings elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from hybridtf.bench import CompareOptions, Records, compare
from hybridtf.bench.cells import Engine
from hybridtf.core import ConfigError, TaskConfig
from hybridtf.cost.match import find_match
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.train import TrainConfig

Evaluate: TypeAlias = Callable[[str, Recipe], Records]
"""Trains a recipe on the tasks of the search and gives its ``sweep`` records; called again, it goes on where it was."""

OPTIONS = CompareOptions(speed_phases=(), memory_phases=(), progress="none")


@dataclass(frozen=True)
class Evaluation:
    """Evaluation by :func:`~hybridtf.bench.compare` into ``folder``; ``tasks`` by name, all with a third side."""

    folder: Path
    tasks: Mapping[str, TaskConfig]
    seeds: Sequence[int]
    options: CompareOptions = OPTIONS
    say: Callable[[str], None] | None = None
    engine: Engine | None = field(default=None, compare=False)

    def __call__(self, name: str, recipe: Recipe) -> Records:
        """``sweep`` records alone: what is held out is not met."""
        return self._compare({name: recipe}, replace(self.options, tasks=self.tasks, choose_only=True))

    def confirm(self, recipes: Mapping[str, Recipe]) -> Records:
        """What recipes that were chosen reach on what is held out; they are not trained again."""
        return self._compare(recipes, replace(self.options, tasks=self.tasks, choose_only=False))

    def _compare(self, recipes: Mapping[str, Recipe], options: CompareOptions) -> Records:
        return compare(recipes, self.folder, seeds=self.seeds, options=options, say=self.say, engine=self.engine)


def with_third_sides(tasks: Mapping[str, TaskConfig]) -> dict[str, TaskConfig]:
    """The tasks with a side to choose on. Raises :class:`ConfigError` for one that keeps none, and for no task."""
    if not tasks:
        raise ConfigError("a search needs at least one task")
    for name, config in tasks.items():
        if "validation" not in type(config).model_fields:
            raise ConfigError(f"the task {name!r} has no option 'validation', so no stack can be chosen on it; give another")
    return {name: config.model_copy(update={"validation": True}) for name, config in tasks.items()}


def largest_vocabulary(tasks: Mapping[str, TaskConfig]) -> int:
    """Of all tasks: parameters are counted with it, so that one width serves all of them."""
    return max(int(config.load(0).vocab_size) for config in tasks.values())


def at_params(recipe: Recipe, n_params: int, vocab_size: int, source: str) -> Recipe:
    """The recipe at the width at which it has ``n_params`` parameters with ``vocab_size`` ids.

    Raises :class:`ConfigError` where no width comes within one percent.
    """
    if "vocab_size" not in type(recipe.model).model_fields:
        raise ConfigError(f"{source}: a {recipe.model.type_name()!r} model has no vocab_size: it cannot be given tasks")
    table = recipe.to_dict()
    table["model"]["vocab_size"] = vocab_size
    sized = parse_recipe(table, source, sections={"train": TrainConfig})
    try:
        found = find_match(sized.model, "params", n_params)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if not found.found:
        raise ConfigError(
            f"{source}: no width has {n_params:,} parameters; the nearest has {found.best.value:,}, more than 1 % away"
        )
    return sized.model_copy(update={"model": found.best.config})
