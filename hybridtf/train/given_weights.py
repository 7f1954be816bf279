"""A run that starts from the weights of another: what stands in the way where they are another model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hybridtf.core import CheckpointError, ComponentConfig
from hybridtf.core import Stack as StackView
from hybridtf.models.weights import load_weights
from hybridtf.recipe import Recipe
from hybridtf.train.checkpoint import RECIPE, find_checkpoint, read_recipe, weights_path
from hybridtf.train.trainer_state import leaves_of

_PARTS = {"mixer": "mixer", "channel_mixer": "channel mixer"}


def start_from(model: nn.Module, recipe: Recipe, source: str | Path | None) -> None:
    """Fill the model that ``recipe`` builds from a run, checkpoint or model folder; None: it stays as it was drawn.

    Raises :class:`CheckpointError` where the weights do not fit, with the layers in which the two recipes differ.
    """
    if source is None:
        return
    folder = find_checkpoint(source)
    try:
        load_weights(model, weights_path(folder))
    except CheckpointError as error:
        found = _differences(folder, recipe)
        if not found:
            raise
        said = f"{'; '.join(found[:5])}{f' (and {len(found) - 5} more)' if len(found) > 5 else ''}"
        fits = next(place for place in (Path(source) / RECIPE, folder / RECIPE) if place.is_file())
        raise CheckpointError(
            f"{source}: holds another model than the recipe asks for: {said}. The recipe that fits it is {fits}. ({error})"
        ) from error


def _differences(folder: Path, recipe: Recipe) -> list[str]:
    """What the recipe of a folder says otherwise of the model; nothing where it cannot be read here."""
    try:
        held = read_recipe(folder).model
    except CheckpointError:
        return []  # a folder of weights alone: that they do not fit is all that is known
    asked = recipe.model
    pairs = zip(held.stacks(), asked.stacks(), strict=False)
    layers = [said for one, two in pairs for part in _PARTS for said in _layers(one, two, part)]
    before, after = (dict(leaves_of(_without_layers(model), "model")) for model in (held, asked))
    others = [
        f"{path} is {before.get(path, 'not set')} there, and {after.get(path, 'not set')} in the recipe"
        for path in sorted({*before, *after}) if before.get(path) != after.get(path)
    ]
    return layers + others


def _without_layers(model: ComponentConfig) -> dict[str, Any]:
    return {name: value for name, value in model.to_dict().items() if name not in ("blocks", "pattern")}


def _layers(held: StackView, asked: StackView, part: str) -> Iterator[str]:
    """``layers 1, 3 have the mixer boom there, and delta_net in the recipe``, alike ones together."""
    if len(held.layers) != len(asked.layers):
        return  # there is no telling which layer is which, and their number is told
    groups: dict[str, list[int]] = {}
    for i, (one, two) in enumerate(zip(held.layers, asked.layers, strict=True)):
        old, new = (getattr(stack.blocks[name], part, None) for stack, name in ((held, one), (asked, two)))
        if old != new:
            groups.setdefault(_both(old, new, _PARTS[part]), []).append(i)
    for what, its in groups.items():
        yield f"{_which(its)} {what}"


def _which(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:8])) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return f"layer {shown} has" if len(layers) == 1 else f"layers {shown} have"


def _both(old: ComponentConfig | None, new: ComponentConfig | None, word: str) -> str:
    if old is None or new is None:
        there, here = (f"no {word}" if part is None else f"the {word} {part.type_name()}" for part in (old, new))
        return f"{there} there, and {here} in the recipe"
    names = [part.type_name() for part in (old, new)]
    if names[0] != names[1]:
        return f"the {word} {names[0]} there, and {names[1]} in the recipe"
    before, after = (dict(leaves_of(part.to_dict(), "")) for part in (old, new))
    options = ", ".join(
        f"{path} = {before.get(path, 'not set')} there, and {after.get(path, 'not set')} in the recipe"
        for path in sorted({*before, *after}) if before.get(path) != after.get(path)
    )
    return f"the {word} {names[0]} with {options}"
