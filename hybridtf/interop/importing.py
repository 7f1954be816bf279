"""A published checkpoint as a recipe and a model of ours: the same numbers, or a refusal by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtf.core import BuildContext, CheckpointError, HybridTFError, known_names
from hybridtf.interop.beside_text import further_heads, heads_left_aside, text_settings, text_tensors
from hybridtf.interop.defaults import ANYWHERE, DEFAULTS, UNUSED
from hybridtf.interop.families import FAMILIES
from hybridtf.interop.family import Family, Table
from hybridtf.interop.gguf_files import SUFFIX, read_gguf
from hybridtf.interop.settings import CONFIG, Settings, read_settings
from hybridtf.interop.tensors import Notes, Tensors, made_whole, quantisation_of, stored
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.models.weights import assign_weights, canonical_tensors, read_weights
from hybridtf.recipe import Recipe, parse_recipe

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, eq=False)
class Imported:
    """``notes``: what a reader should know of how it was read."""

    model: LanguageModel
    recipe: Recipe
    family: Family
    dtype: torch.dtype
    notes: tuple[str, ...]


def import_checkpoint(source: str | Path, *, dtype: torch.dtype | None = None) -> Imported:
    """The model of a folder with ``config.json`` and ``model.safetensors`` (or its shards and their index), in the published
    names, or of a GGUF file.

    Every setting is understood and every tensor has its place, or :class:`CheckpointError` says which has not. ``dtype``: None
    for that of the files; where they have several, the widest, which holds all of them exactly.
    """
    source = Path(source)
    if source.suffix == SUFFIX:
        settings, tensors, told = read_gguf(source)
        family = family_of(settings)
        return _filled(source, family, recipe_of(family, settings), settings, tensors, told, dtype)
    whole = read_settings(source / CONFIG)
    settings = text_settings(whole)
    family, quantised = family_of(settings), quantisation_of(settings)
    recipe = recipe_of(family, settings)
    tensors, told = made_whole(stored(read_weights(source / WEIGHTS)), quantised, dtype)
    if settings is not whole:
        tensors, aside = text_tensors(tensors)
        told = (f"the text of a {whole.values['model_type']}, read as {family.model_type}", *aside, *told)
    return _filled(source, family, recipe, settings, tensors, told, dtype)


def _filled(
    source: Path, family: Family, recipe: Recipe, settings: Settings, tensors: Tensors, told: Notes, dtype: torch.dtype | None
) -> Imported:
    """The recipe's model with the tensors in their places."""
    assert isinstance(recipe.model, LanguageModelConfig)
    links = links_of(family, recipe)
    links.further(*further_heads(settings, len(recipe.model.layers())))
    if family.prefix and not any(name.startswith(family.prefix) for name in tensors):
        links.shorten(family.prefix)
    links.follow(tensors)
    links.check_names(tensors, str(source))
    chosen, notes = _dtype(tensors, links, dtype)
    told = (*told, *heads_left_aside(tensors, links.further_heads))
    model = recipe.model.build(BuildContext(d_model=0, param_dtype=chosen))
    own = canonical_tensors(model)
    ours = {name: value.to(own[name].dtype) for name, value in links.read(tensors, str(source))}
    assign_weights(model, ours, where=str(source))
    return Imported(model.eval(), recipe, family, chosen, (*told, *notes, *family.notes(recipe.model)))


def family_of(settings: Settings) -> Family:
    """By ``model_type``. Raises :class:`CheckpointError` for one that is not known."""
    name = settings.take("model_type", kind=str)
    if name not in FAMILIES:
        raise CheckpointError(f"{settings.where}: no family reads model_type {name!r}. {known_names(name, FAMILIES)}")
    return FAMILIES[name]


def recipe_of(family: Family, settings: Settings) -> Recipe:
    """The recipe that the settings mean. Raises :class:`CheckpointError` for what is not understood."""
    table = table_of(family, settings)
    title = settings.values.get("_name_or_path") or family.architecture
    try:
        recipe = parse_recipe({"meta": {"title": str(title)}, "model": {"type": "language_model", **table}}, settings.where)
        recipe.model.build(BuildContext(d_model=0, device=torch.device("meta")))
    except CheckpointError:
        raise
    except HybridTFError as error:
        raise CheckpointError(f"{settings.where}: the settings are of no model that can be built: {error}") from error
    return recipe


def table_of(family: Family, settings: Settings) -> Table:
    """The section ``[model]``; raises as :func:`recipe_of`, but for what no model is built from."""
    settings.fill(DEFAULTS.get(family.model_type, {}))
    settings.says_nothing(ANYWHERE | UNUSED.get(family.model_type, {}))
    table = family.table(settings)
    settings.refuse_the_rest()
    return table


def links_of(family: Family, recipe: Recipe) -> WeightMap:
    """All links of the recipe's model."""
    assert isinstance(recipe.model, LanguageModelConfig)
    model = recipe.model.build(BuildContext(d_model=0, device=torch.device("meta")))
    own = canonical_tensors(model)
    whole = (name for name, tensor in own.items() if not tensor.is_floating_point())
    links = WeightMap({name: tensor.shape for name, tensor in own.items()}, whole)
    family.weights(links, recipe.model)
    links.check_complete()
    return links


def _dtype(tensors: Tensors, links: WeightMap, asked: torch.dtype | None) -> tuple[torch.dtype, tuple[str, ...]]:
    held = tensors.dtypes()
    count = Counter(held[name] for link in links.links if not links.whole.issuperset(link.ours) for name in link.theirs)
    other = [dtype for dtype in count if not dtype.is_floating_point]
    narrow = [dtype for dtype in count if dtype.itemsize < 2]
    if other or narrow:
        wrong = {dtype: name for link in links.links if not links.whole.issuperset(link.ours) for name in link.theirs
                 for dtype in (held[name],) if dtype in (*other, *narrow)}
        name = min(wrong.values())
        raise CheckpointError(f"{tensors.path}: {name} is {held[name]}: quantised tensors are not read")
    widest = max(count, key=lambda dtype: (dtype.itemsize, torch.finfo(dtype).max))
    if torch.float16 in count and torch.bfloat16 in count and widest.itemsize == 2:
        widest = torch.float32  # neither holds the other
    chosen = asked or widest
    notes = []
    if len(count) > 1:
        said = ", ".join(f"{n:,} tensors in {_word(dtype)}" for dtype, n in count.most_common())
        notes.append(f"{said}: kept as {_word(chosen)}")
    elif chosen is not widest:
        notes.append(f"the files are in {_word(widest)}: kept as {_word(chosen)}, as asked")
    return chosen, tuple(notes)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

