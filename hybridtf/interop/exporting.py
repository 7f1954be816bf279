"""A model of ours as a published checkpoint, where a family can say it exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError, ConfigError, HybridTFError
from hybridtf.core.files import atomic_folder
from hybridtf.interop.families import FAMILIES
from hybridtf.interop.family import Family
from hybridtf.interop.importing import WEIGHTS, links_of, recipe_of
from hybridtf.interop.settings import CONFIG, Settings, write_settings
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.models.weights import MAX_SHARD_BYTES, canonical_tensors, write_tensors

OF_ANOTHER_KIND = (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError)
"""What a family meets that asks a layer for an option of its own kind of layer."""


def export_checkpoint(
    model: LanguageModel, folder: str | Path, *, family: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Family:
    """Write ``config.json`` and safetensors in the published names, which transformers loads; the family that says the model.

    ``family``: None for the first that can. Raises :class:`CheckpointError` where none can, with what it is that the nearest
    cannot say, and nothing is written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is there already and not empty; nothing was written")
    found, settings = _expressed(model.config, family)
    recipe = recipe_of(found, Settings(settings, CONFIG))
    assert isinstance(recipe.model, LanguageModelConfig)
    called = dict(zip(model.config.layers(), recipe.model.layers(), strict=True))
    tensors: dict[str, Tensor] = {_as_called(name, called): value.detach() for name, value in canonical_tensors(model).items()}
    theirs = links_of(found, recipe).write(tensors)
    dtype = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    with atomic_folder(folder) as temporary:
        write_tensors(theirs, temporary / WEIGHTS, max_shard_bytes=max_shard_bytes)
        write_settings(temporary / CONFIG, {**settings, "dtype": dtype})
    return found


def _expressed(config: LanguageModelConfig, name: str | None) -> tuple[Family, dict[str, Any]]:
    """The family and its settings, checked: read again they are the same model."""
    unique = {family.model_type: family for family in FAMILIES.values()}
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"no family is called {name!r}; known: {', '.join(unique)}")
    asked = unique.values() if name is None else [FAMILIES[name]]
    nearest: tuple[int, str] | None = None
    for family in asked:
        try:
            settings, again = _read_back(family, config)
        except (HybridTFError, *OF_ANOTHER_KIND) as error:
            found = _without_odd_layers(family, config)
            if found is None and name is not None:
                why = str(error) if isinstance(error, HybridTFError) else "its layers are of other kinds"
                raise CheckpointError(f"{family.model_type} cannot say this model ({config.pattern}): {why}") from error
            if found is None:
                continue
            settings, again = None, found
        faults = list(differences(layer_tables(config), layer_tables(again)))
        if not faults and settings is not None:
            return family, settings
        if faults and (nearest is None or len(faults) < nearest[0]):
            nearest = len(faults), f"{family.model_type} comes nearest and cannot say {_by_layer(config, faults)}"
    raise CheckpointError("no published family has this model" + ("" if nearest is None else f": {nearest[1]}"))


def _read_back(family: Family, config: LanguageModelConfig) -> tuple[dict[str, Any], LanguageModelConfig]:
    """What the family says of the model, and the model that this means."""
    settings = {"model_type": family.model_type, "architectures": [family.architecture], **family.settings(config)}
    again = recipe_of(family, Settings(settings, CONFIG)).model
    assert isinstance(again, LanguageModelConfig)
    return settings, again


def _without_odd_layers(family: Family, config: LanguageModelConfig) -> LanguageModelConfig | None:
    """The family's model of the most frequent layer alone, to say which layers it is that it does not have."""
    layers = config.layers()
    (most, n), *_ = Counter(layers).most_common()
    if n == len(layers):
        return None
    blocks = {most: config.to_dict()["blocks"][most]}
    try:
        alike = LanguageModelConfig(**config.to_dict() | {"blocks": blocks, "pattern": f"{most}*{len(layers)}"})
        return _read_back(family, alike)[1]
    except (HybridTFError, *OF_ANOTHER_KIND):
        return None


def _by_layer(config: LanguageModelConfig, faults: list[str]) -> str:
    """The first fault, with the letter of its block where it is of a layer, and which other layers have faults."""
    layers = config.layers()
    found = [(int(at[1]), at[2]) for at in (re.fullmatch(r"layers\[(\d+)\]\.(.*)", fault) for fault in faults) if at]
    if len(found) < len(faults):
        return next(fault for fault in faults if not fault.startswith("layers["))
    first, what = found[0]
    others = sorted({i for i, _ in found} - {first})
    also = "" if not others else f"; nor layer{'s'[: len(others) > 1]} {', '.join(map(str, others[:8]))}"
    return f"layer {first} (block {layers[first]}): {what}{also}{' and more' if len(others) > 8 else ''}"


def layer_tables(config: LanguageModelConfig) -> dict[str, Any]:
    """The model layer by layer, without the names of its blocks and with every option written out."""
    table = config.to_dict()
    blocks = {name: block.to_dict() for name, block in config.blocks.items()}
    rest = {name: value for name, value in table.items() if name not in ("blocks", "pattern", "n_layers", "residual_init")}
    layers = config.layers()
    weights = [layers.index(name) if blocks[name].get("shared") else i for i, name in enumerate(layers)]
    return {**rest, "layers": [blocks[name] for name in layers], "weights_of_layer": weights}


def _as_called(tensor: str, called: Mapping[str, str]) -> str:
    """A tensor of a shared block under the name that the family has for the block."""
    shared = "stack.layers.shared_"
    if not tensor.startswith(shared):
        return tensor
    block, rest = tensor.removeprefix(shared).split(".", 1)
    return f"{shared}{called[block]}.{rest}"


def differences(ours: Any, again: Any, path: str = "") -> Iterator[str]:
    """Where two tables differ, in words."""
    if isinstance(ours, Mapping) and isinstance(again, Mapping):
        if ours.get("type") != again.get("type"):  # their other options are of different things
            yield f"{path}.type = {ours.get('type')!r} (it has {again.get('type')!r})".removeprefix(".")
            return
        for name in sorted(ours.keys() | again.keys()):
            yield from differences(ours.get(name), again.get(name), f"{path}.{name}" if path else name)
    elif isinstance(ours, list) and isinstance(again, list):
        if len(ours) != len(again):
            yield f"{path}: {len(ours)} entries, where it has {len(again)}"
            return
        for i, (one, other) in enumerate(zip(ours, again, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    elif ours != again and not (isinstance(ours, torch.Tensor) or isinstance(again, torch.Tensor)):
        yield f"{path} = {ours!r} (it has {again!r})"
