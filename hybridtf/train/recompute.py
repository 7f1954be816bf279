"""Activation checkpointing by layer: less memory for a second forward pass of the layers chosen."""

from __future__ import annotations

from torch import nn

from hybridtf.core import ConfigError
from hybridtf.models import Stack
from hybridtf.train.config import CheckpointLayers


def chosen_layers(layers: CheckpointLayers, n_layers: int) -> frozenset[int]:
    """The layers (from 0) that ``train.checkpoint_layers`` means; :class:`ConfigError` for one that is not there."""
    if isinstance(layers, str):
        return frozenset(range(n_layers if layers == "all" else 0))
    if isinstance(layers, int):
        return frozenset(range(0, n_layers, layers))
    for i in layers:
        if i >= n_layers:
            raise ConfigError(f"train.checkpoint_layers names layer {i}; the model has layers 0 to {n_layers - 1}")
    return frozenset(layers)


def set_checkpointed(model: nn.Module, layers: CheckpointLayers) -> None:
    """Let the stacks of ``model`` recompute the chosen layers; layers are counted through all its stacks, in order."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    chosen = chosen_layers(layers, sum(len(stack.order) for stack in stacks))
    before = 0
    for stack in stacks:
        stack.checkpointed = frozenset(i - before for i in chosen if before <= i < before + len(stack.order))
        before += len(stack.order)
