"""A model that no recipe makes, trained by the loop of all others: built by a function, its checkpoint holds weights alone.

Axes: b batch, t time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import PrivateAttr
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigError, ModelConfig, ParamSpec, Role, Segments, Stack, TaskConfig
from hybridtf.core.init import constant
from hybridtf.cost.calls import IGNORED, call, device_of, has_state
from hybridtf.models.language_model import Loss
from hybridtf.tasks import Task

Factory: TypeAlias = Callable[[Task], nn.Module]


class ForeignModelConfig(ModelConfig):
    """Stands for the model in a recipe: what tells it from another one. Only Python makes it (:meth:`of`); a file cannot."""

    type: Literal["foreign"] = "foreign"
    function: str
    """Module and name of the function."""
    vocab_size: int
    parameters: str
    """Digest of the names and shapes of the parameters."""
    _factory: Factory = PrivateAttr()
    _task: TaskConfig = PrivateAttr()

    @classmethod
    def of(cls, factory: Factory, config: TaskConfig, task: Task) -> Self:
        """The model that ``factory`` makes for ``task``, which ``config`` loads."""
        shapes = {name: list(p.shape) for name, p in _made(factory, task, 0).named_parameters()}
        digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]
        where = f"{getattr(factory, '__module__', '')}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
        made = cls(function=where, vocab_size=task.vocab_size, parameters=digest)
        made._factory, made._task = factory, config
        return made

    @classmethod
    def tiny(cls) -> Self:
        raise ConfigError("a foreign model is built by a function, which no config holds")

    def stacks(self) -> tuple[Stack, ...]:
        """None: nothing is known of its layers."""
        return ()

    def build(self, ctx: BuildContext) -> ForeignModel:
        """The model, its weights drawn by its own means under the context's seed."""
        with ctx.device:  # made where it belongs: shapes that stand for tensors cannot be moved
            model = ForeignModel(_made(self._factory, self._task.load(0), ctx.seed))
        wrong = [p for p in model.parameters() if p.device.type != ctx.device.type or p.dtype != ctx.param_dtype]
        return model.to(device=ctx.device, dtype=ctx.param_dtype) if wrong else model


def _made(factory: Factory, task: Task, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = factory(task)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the function from task to model gave {type(model).__name__}, no nn.Module")
    return model


class ForeignModel(nn.Module):
    """A foreign module with what training asks of a model: a loss, and a role for every parameter.

    A parameter of one axis is a norm or a bias, which is not decayed; any other one is a matrix.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        if has_state(model):
            self.init_state = model.init_state
        self.takes_segments = "segments" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Roles alone: the module has drawn its own weights."""
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}

        def role(parameter: Tensor) -> Role:
            if id(parameter) in embeddings:
                return "embedding"
            return "matrix" if parameter.ndim > 1 else "norm"

        return {name: ParamSpec(role(p), constant(0.0)) for name, p in self.named_parameters(remove_duplicate=False)}

    def forward(self, ids: Tensor, segments: Segments | None = None, **options: Any) -> Any:
        """What the module answers. Raises :class:`ConfigError` for documents in one row where it cannot tell them apart."""
        if segments is None:
            return self.model(ids, **options)
        if not self.takes_segments:
            raise ConfigError(
                f"{type(self.model).__name__}.forward takes no segments: rows of several documents would run into each other"
            )
        return self.model(ids, segments=segments, **options)

    def loss(self, inputs: Tensor, targets: Tensor, segments: Segments | None = None) -> Loss:
        """Cross-entropy of ``targets`` (b t; -100 is not scored) given ``inputs`` (b t), in float32 at least."""
        logits, _ = call(self, inputs, segments=segments)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, (targets != IGNORED).sum(), {})
