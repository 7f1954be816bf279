"""What a recipe holds, as frozen tables."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, Field, PlainValidator

from hybridtf.core import Component, ConfigError, ConfigTable, ModelConfig, TaskConfig, active
from hybridtf.core.registry import BUILT_IN, own_version
from hybridtf.recipe.provenance import commit

DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""The name of a distribution."""


def _distributions(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not DISTRIBUTION.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a distribution (write the name alone, without a version)")
    return names


class Resolved(ConfigTable):
    """Where a run's result came from: written beside it, in ``[meta.resolved]``."""

    python: str
    torch: str
    hybridtf: str
    plugins: dict[str, str] = Field(default_factory=dict)
    """Versions of the plugins that were loaded."""
    kernels: dict[str, dict[str, str]] = Field(default_factory=dict)
    """For every op of the model, by module: which kernel ran in which phase."""
    commit: str | None = None
    """The git commit of the working directory, with ``-dirty`` where files were changed."""
    seed: int | None = None


class Meta(ConfigTable):
    """About the recipe; nothing here changes what is built."""

    title: str = ""
    source: str = ""
    """Where the architecture was published."""
    description: str = ""
    requires: Annotated[tuple[str, ...], AfterValidator(_distributions)] = ()
    """Distributions that must be installed, by name: the plugins whose components the recipe uses."""
    resolved: Resolved | None = None


def _section(value: Any) -> Any:
    if value is None or isinstance(value, BaseModel | Mapping):
        return value
    raise ConfigError(f"must be a table, not {type(value).__name__}")


Section = Annotated[Any, PlainValidator(_section)]
"""A table that a room above this one validates."""


class Recipe(ConfigTable):
    """A model with, optionally, what to train it on and how: ``Recipe(model=LanguageModelConfig(...))``.

    ``train`` is the plain table of a file, or the config that the ``train`` room makes of it. Raises
    :class:`RecipeError` with every fault.
    """

    meta: Meta = Field(default_factory=Meta)
    model: Component[ModelConfig]
    task: Component[TaskConfig] | None = None
    train: Section = None

    def resolved(self, *, kernels: Mapping[str, Mapping[str, str]] | None = None, seed: int | None = None) -> Recipe:
        """The same recipe with what a run used in ``meta.resolved``; ``kernels`` as of ``core.kernels_used``."""
        plugins = {name: version for name, version in active().plugins.items() if name != BUILT_IN}
        used = Resolved(
            python=platform.python_version(), torch=str(torch.__version__),
            hybridtf=own_version(), plugins=plugins,
            kernels={module: dict(phases) for module, phases in (kernels or {}).items()},
            commit=_commit(), seed=seed,
        )
        return self.model_copy(update={"meta": self.meta.model_copy(update={"resolved": used})})


def _commit() -> str | None:
    found, dirty = commit()
    return f"{found}-dirty" if found and dirty else found
