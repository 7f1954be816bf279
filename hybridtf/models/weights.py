"""Weights on disk: one safetensors file, each tensor once under its canonical name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridtf.core import CheckpointError, known_names
from hybridtf.core.files import atomic_file


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name; a tied or shared tensor appears once."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[name] = buffer
    return tensors


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's tensors, atomically. Raises :class:`CheckpointError` where the disk refuses."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in canonical_tensors(model).items()}
    with atomic_file(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises :class:`CheckpointError` for a missing or corrupt one."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such weights file")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the model from a file. Every tensor must fit: none missing, none left over, shapes equal; nothing is re-drawn.

    Raises :class:`CheckpointError` naming what does not fit.
    """
    assign_weights(model, read_weights(path), where=str(path))


def assign_weights(model: nn.Module, tensors: dict[str, Tensor], *, where: str) -> None:
    """As :func:`load_weights`, from tensors in memory."""
    own = canonical_tensors(model)
    faults = []
    for name in sorted(own.keys() - tensors.keys()):
        faults.append(f"{name} is missing")
    for name in sorted(tensors.keys() - own.keys()):
        alike = [n for n in own if n.split(".")[-1] == name.split(".")[-1]]
        faults.append(f"{name} is not in the model. {known_names(name, alike)}")
    for name in sorted(own.keys() & tensors.keys()):
        if own[name].shape != tensors[name].shape:
            faults.append(f"{name} has shape {tuple(tensors[name].shape)}, the model's is {tuple(own[name].shape)}")
        elif own[name].dtype != tensors[name].dtype:
            faults.append(f"{name} is {tensors[name].dtype}, the model's is {own[name].dtype}: build the model in that dtype")
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{where}: does not fit the model: {'; '.join(faults[:5])}{more}")
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
