"""What is measured: a name and a way to build the model. Recipes are one way in, foreign modules another.

A model is any ``nn.Module`` that is called ``model(ids, segments=..., state=...)`` with token ids (b t, int64) and
answers scores (b t vocab), as a tensor or as an object with ``logits`` and ``state``. ``segments`` and ``state`` are
given only where a harness needs them: training speed and memory need neither. Decoding, carried evaluation and state
sizes also need ``init_state(batch_size, max_len=None)``, whose state is a pytree of tensors or of ``hybridtf.core``
leaves. A model of its own ``loss(inputs, targets, segments)`` is trained on that; any other on the cross-entropy of
its scores.

Axes: b batch, t time.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from hybridtf.core import BuildContext, ConfigError
from hybridtf.core.kernels import PHASES, OpKernel
from hybridtf.cost.calls import device_of
from hybridtf.cost.foreign import adapted
from hybridtf.recipe import Recipe
from hybridtf.tasks import Task
from hybridtf.train import build_optimizer, load_run, train_config
from hybridtf.train.config import CheckpointLayers
from hybridtf.train.recompute import set_checkpointed

ModelFactory: TypeAlias = Callable[[Task], nn.Module]
"""A function from task to model: the door for foreign models. It reads ``task.vocab_size`` and what else it needs."""


@dataclass(frozen=True)
class Identity:
    """Which model a record is about: the common fields that do not depend on the measurement."""

    recipe: str
    recipe_hash: str | None
    pattern: str | None
    seed: int
    n_params: int
    kernels: Mapping[str, Mapping[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class Subject:
    """A model to measure. ``build()`` gives it on the device it is to run on, a fresh one at each call. What is made by the
    constructors below can be sent to another process, if the function that makes a foreign model can.

    ``recipe``: the recipe as a plain table, or None for a foreign model. ``vocab_size``: token ids are drawn below it.
    """

    name: str
    build: Callable[[], nn.Module]
    vocab_size: int
    recipe: Mapping[str, Any] | None = None
    pattern: str | None = None
    seed: int = 0
    autocast: torch.dtype | None = None
    """The dtype that speed and memory are measured in, by autocast; None: that of the parameters."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """The optimizer of training steps; None: AdamW."""

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, name: str, *, seed: int = 0, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None,
    ) -> Subject:
        """The model of a recipe, with the weights that ``seed`` gives.

        Of ``[train]`` a step has the optimizer and what is computed again, and never ``teacher``: time and memory are those of
        a step on the text alone.
        """
        config = recipe.model
        if not hasattr(config, "vocab_size"):
            raise ConfigError(f"{name}: a {config.type_name()!r} model has no vocab_size: it cannot be fed token ids")

        ctx = BuildContext(
            d_model=getattr(config, "d_model", 0), device=torch.device(device), param_dtype=dtype, compute_dtype=autocast,
            seed=seed,
        )
        optimizer, build = None, functools.partial(config.build, ctx)
        if recipe.train is not None:  # with every option written out: defaults left to the file are the same recipe
            train = train_config(recipe)
            build = functools.partial(_checkpointed, build, train.checkpoint_layers)
            recipe = recipe.model_copy(update={"train": train})
            optimizer = functools.partial(build_optimizer, config=train) if train.optimizer != "adamw" else None
        pattern = " | ".join(stack.pattern for stack in config.stacks())
        return cls(name, build, config.vocab_size, recipe.to_dict(), pattern, seed, autocast, optimizer)

    @classmethod
    def from_model(cls, model: nn.Module, name: str, *, vocab_size: int | None = None, **more: Any) -> Subject:
        """A model that stands already (a trained one, or foreign): every ``build()`` is a copy of it."""
        config = getattr(model, "config", None)
        size = vocab_size if vocab_size is not None else getattr(config, "vocab_size", None)
        if size is None:
            raise ConfigError(f"{name}: the model's config has no vocab_size; give vocab_size=")
        return cls(name, functools.partial(copy.deepcopy, adapted(model)), size, **more)

    @classmethod
    def from_task(
        cls, name: str, factory: ModelFactory, task: Task, *, seed: int = 0, device: torch.device | str = "cpu", **more: Any
    ) -> Subject:
        """The foreign model that ``factory`` makes for ``task``: an ``nn.Module``, a causal model of transformers.

        Every ``build()`` calls it under ``seed``, so that all are the same model, and moves what it gives to ``device``;
        the caller's own random state stays as it was. Raises :class:`ConfigError` where it gives no module.
        """

        return cls(name, functools.partial(_made_for, task, factory, name, seed, device), task.vocab_size, seed=seed, **more)

    @classmethod
    def from_run(cls, path: str | Path, name: str | None = None, *, device: torch.device | str = "cpu") -> Subject:
        """The trained model of a run, checkpoint or model folder; ``name``: the folder's unless given."""
        found = load_run(path, device=device)
        recipe = found.recipe
        seed = 0 if recipe.train is None else train_config(recipe).seed
        described = cls.from_recipe(recipe, name or Path(path).name, seed=seed, device=device)
        return replace(described, build=functools.partial(_loaded, path, device))

    @property
    def recipe_hash(self) -> str | None:
        """See :func:`recipe_hash`."""
        return None if self.recipe is None else recipe_hash(self.recipe)

    def dtype_of(self, model: nn.Module) -> str:
        """What ``model`` computes in: ``float32``, or ``bfloat16 by autocast``."""
        if self.autocast is not None:
            return f"{str(self.autocast).removeprefix('torch.')} by autocast"
        first = next(model.parameters(), None)
        return str(torch.get_default_dtype() if first is None else first.dtype).removeprefix("torch.")

    def identity(self, model: nn.Module) -> Identity:
        """The identity fields of the records about ``model``, which this subject built."""
        n_params = sum(p.numel() for p in model.parameters())
        kernels = kernels_by_op(model, self.autocast)
        return Identity(self.name, self.recipe_hash, self.pattern, self.seed, n_params, kernels)


def _loaded(path: str | Path, device: torch.device | str) -> nn.Module:
    return load_run(path, device=device).model


def _made_for(task: Task, factory: ModelFactory, name: str, seed: int, device: torch.device | str) -> nn.Module:
    """What ``factory`` makes for ``task`` under ``seed``, on ``device``."""
    place = torch.device(device)
    with torch.random.fork_rng(), place:
        torch.manual_seed(seed)
        model = factory(task)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}: the function from task to model gave {type(model).__name__}, no nn.Module")
    return adapted(model if device_of(model).type == place.type else model.to(place))


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """16 hex digits of what a recipe builds and does: all but ``meta``, which is for people, and ``train.seed``, which
    is a field of every record."""
    content = {name: section for name, section in recipe.items() if name != "meta" and section is not None}
    if isinstance(content.get("train"), Mapping):
        content["train"] = {name: value for name, value in content["train"].items() if name != "seed"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checkpointed(build: Callable[[], nn.Module], layers: CheckpointLayers) -> nn.Module:
    """The model as its training runs it: what is computed again takes no memory in between, and more operations."""
    model = build()
    set_checkpointed(model, layers)
    return model


def kernels_by_op(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, dict[str, str]]:
    """For every op of the model and every phase: the kernels its layers use in ``dtype`` (None: their own), with commas
    between several."""
    used: dict[str, dict[str, set[str]]] = {}
    for child in model.modules():
        if isinstance(child, OpKernel):
            phases = used.setdefault(child.op, {phase: set() for phase in PHASES})
            for phase in PHASES:
                phases[phase].add(child.chosen.get((phase, dtype or child.dtype), "none"))
    return {op: {phase: ", ".join(sorted(names)) for phase, names in phases.items()} for op, phases in used.items()}
