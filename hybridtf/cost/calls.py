"""Calling any model: a recipe's, or a foreign module that answers scores.

Axes: b batch, t time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import ConfigError, Segments, State, StateLeaf

IGNORED = -100
"""A target that is not scored."""


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is; the CPU for a model without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def has_state(model: nn.Module) -> bool:
    """Whether the model can carry what it has read."""
    return callable(getattr(model, "init_state", None))


def call(
    model: nn.Module, ids: Tensor, *, segments: Segments | None = None, state: State | None = None
) -> tuple[Tensor, State | None]:
    """Scores (b t vocab) of token ids (b t), and the state after them."""
    options = {name: value for name, value in (("segments", segments), ("state", state)) if value is not None}
    out = model(ids, **options)
    logits: Tensor | None = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    after: State | None = getattr(out, "state", None)
    if logits is None:
        raise ConfigError(
            f"{type(model).__name__} answered {type(out).__name__}; a measured model answers scores as a tensor, "
            "or an object with logits"
        )
    if state is not None and after is None:
        raise ConfigError(f"{type(model).__name__} was given a state and returned none")
    return logits, after


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats a token, the quantity that a training step differentiates."""
    own = getattr(model, "loss", None)
    if callable(own):
        loss: Tensor = own(inputs, targets).mean()
        return loss
    logits, _ = call(model, inputs)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def copy_state(state: State) -> State:
    """An independent copy, whatever the state is made of."""
    return pytree.tree_map(_copy_leaf, state, is_leaf=lambda x: isinstance(x, StateLeaf))


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, StateLeaf):
        return leaf.restore()
    return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def need_state(model: nn.Module, what: str) -> None:
    """Raise :class:`ConfigError` where ``what`` needs a state and the model has none."""
    if not has_state(model):
        raise ConfigError(f"{what} needs a model with init_state(batch_size, max_len); {type(model).__name__} has none")
