"""Replacing the mixers of some layers of a model by others; see :func:`replace_mixers`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtf.core import (
    BlockConfig,
    BuildContext,
    ConfigError,
    RecipeError,
    SequenceMixerConfig,
    UnknownNameError,
    active,
    known_names,
)
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.models.pattern import print_pattern
from hybridtf.models.weights import canonical_tensors
from hybridtf.recipe import Recipe
from hybridtf.surgery.in_way import in_the_way
from hybridtf.surgery.roles import heads_of, left_behind, taken_options
from hybridtf.surgery.transfer import FATES, Fate, Piece, transfer

Table = Mapping[str, Any]


class MixerError(ConfigError):
    """The mixer that was asked for cannot be, or not in a layer; ``why`` is the message without its name."""

    def __init__(self, name: str, why: str) -> None:
        self.why = why
        super().__init__(f"mixer {name}: {why}" if name else f"mixer: {why}")


@dataclass(frozen=True, eq=False)
class Operated:
    """A model with other mixers, and what became of every weight.

    ``pieces``: of each replaced layer, named as in its mixer. ``others``: numbers of everything else, which is as it was.
    ``taken``: options of the new mixers that nobody gave and the replaced ones had, by layer; ``left``: options of the replaced
    ones that are not at their default, and that the new ones have not. ``in_way``: what of the new mixers, newly drawn, stands
    between what was kept and what it did, in words. ``teacher``: of the recipe's ``[train]``, where it was taken out.
    """

    model: LanguageModel
    recipe: Recipe
    pieces: Mapping[int, tuple[Piece, ...]]
    others: int
    taken: Mapping[int, Mapping[str, Any]]
    left: Mapping[int, Mapping[str, Any]]
    in_way: Mapping[int, tuple[str, ...]]
    teacher: str | None

    def counts(self) -> dict[Fate, int]:
        """Numbers by fate: the first three are all that the new model has; ``kept`` has the ``others`` in it."""
        found = dict.fromkeys(FATES, 0)
        for pieces in self.pieces.values():
            for piece in pieces:
                found[piece.fate] += piece.n
        found["kept"] += self.others
        return found


def replace_mixers(
    model: LanguageModel, recipe: Recipe, layers: Collection[int], mixer: Table | str | None = None, *,
    n_kv_heads: int | None = None, seed: int = 0, leave: Collection[str] = (),
) -> Operated:
    """A copy of ``model``, which ``recipe`` builds, with another mixer in each of ``layers`` (from 0).

    ``mixer``: a table as in a recipe, or a name alone; what it leaves open is taken from the replaced mixer where that says how
    its heads are cut and read (:mod:`hybridtf.surgery.roles`), but for the options in ``leave``. None: the replaced one with
    ``n_kv_heads``. ``seed``: of what no weight of the old model can fill. The model itself is left as it was; the recipe's
    ``[train.teacher]``, which taught that one, is left out.

    Raises :class:`ConfigError` for layers, options and sizes that cannot be: :class:`MixerError` where it is the mixer's.
    """
    chosen = _chosen(layers, len(model.config.layers()))
    plan = _plan(model, chosen, _asked(mixer, n_kv_heads), leave)
    try:
        built = plan.config.build(BuildContext(d_model=0, device=model.device, param_dtype=_dtype(model), seed=seed))
    except ConfigError as error:
        raise MixerError("", str(error)) from None  # the blocks as they were did build
    pieces = _transfer(model, built, chosen, plan.config)
    others = _keep_others(model, built, chosen)
    about = recipe.meta.model_copy(update={"resolved": None})
    train, teacher = _untaught(recipe.train)
    made = recipe.model_copy(update={"model": plan.config, "meta": about, "train": train})
    in_way = {i: in_the_way(_mixer(built, i), found) for i, found in pieces.items()}
    return Operated(built.train(model.training), made, pieces, others, plan.taken, plan.left, in_way, teacher)


def _untaught(train: Any) -> tuple[Any, str | None]:
    """``[train]`` without its teacher, and which one that was."""
    teacher = train.get("teacher") if isinstance(train, Mapping) else getattr(train, "teacher", None)
    if teacher is None:
        return train, None
    run = teacher.get("run") if isinstance(teacher, Mapping) else teacher.run
    if isinstance(train, Mapping):
        return {name: value for name, value in train.items() if name != "teacher"}, run
    return train.model_copy(update={"teacher": None}), run


# -- the config ----------------------------------------------------------------------------------------------------------


def _chosen(layers: Collection[int], n_layers: int) -> list[int]:
    """In order, each once."""
    chosen = sorted(set(layers))
    for i in chosen:
        if not 0 <= i < n_layers:
            raise ConfigError(f"layer {i} is not there; the model has layers 0 to {n_layers - 1}")
    if not chosen:
        raise ConfigError("no layer was named whose mixer is to be replaced")
    return chosen


class _Plan(NamedTuple):
    """The config of the new model, and options that were taken and left, by layer."""

    config: LanguageModelConfig
    taken: dict[int, dict[str, Any]]
    left: dict[int, dict[str, Any]]


def _plan(model: LanguageModel, chosen: Sequence[int], table: Table, leave: Collection[str]) -> _Plan:
    config = model.config
    names = config.layers()
    blocks, new_names = dict(config.blocks), list(names)
    taken: dict[int, dict[str, Any]] = {}
    left: dict[int, dict[str, Any]] = {}
    offered: set[str] = set()
    for old in dict.fromkeys(names[i] for i in chosen):
        its = [i for i in chosen if names[i] == old]
        block, found, could = _new_block(model, its[0], config.blocks[old], table, leave)
        before, after = config.blocks[old].mixer, block.mixer  # type: ignore[attr-defined]
        offered |= could
        taken |= dict.fromkeys(its, found)
        left |= dict.fromkeys(its, left_behind(before, after, {*table, *leave}))
        new = old if len(its) == names.count(old) else _free_name(f"{old}_{after.type_name()}", blocks)
        if new != old and block.shared:
            raise ConfigError(f"layer {its[0]}: its block {old!r} is shared, so all its layers change or none")
        blocks[new] = block
        for i in its:
            new_names[i] = new
    for option in leave:
        if option not in offered:
            hint = known_names(option, offered)
            raise ConfigError(f"leave: the new mixers would take no {option!r} from the old ones. {hint}")
    return _Plan(_config(config, new_names, blocks), taken, left)


def _asked(mixer: Table | str | None, n_kv_heads: int | None) -> Table:
    """The table that is asked for; ``type`` is missing where the mixer itself stays."""
    table = {"type": mixer} if isinstance(mixer, str) else dict(mixer or {})
    if not table and n_kv_heads is None:
        raise ConfigError("nothing to do: give a mixer, or n_kv_heads")
    if mixer is not None and not isinstance(table.get("type"), str):
        raise MixerError("", "the table needs a type, as in { type = \"gated_delta_net\" }")
    if n_kv_heads is not None and "n_kv_heads" in table:
        raise ConfigError("n_kv_heads is in the table of the mixer already; give it once")
    return table if n_kv_heads is None else {**table, "n_kv_heads": n_kv_heads}


def _new_block(
    model: LanguageModel, layer: int, block: BlockConfig, table: Table, leave: Collection[str]
) -> tuple[BlockConfig, dict[str, Any], set[str]]:
    """The block of a layer with the mixer asked for, options that it took from the old one, and what it could have taken."""
    old: SequenceMixerConfig | None = getattr(block, "mixer", None)
    if old is None:
        raise ConfigError(f"layer {layer}: its block {model.config.layers()[layer]!r} has no mixer to replace")
    registry = active()["mixers"]
    name = table.get("type", old.type_name())
    try:
        cls, preset = registry.get(name), registry.presets().get(name)
    except UnknownNameError as error:
        raise MixerError("", str(error)) from None
    assert issubclass(cls, SequenceMixerConfig)
    heads = heads_of(old, _mixer(model, layer))
    found = taken_options(cls, {} if preset is None else preset.options, old, heads)
    if "type" not in table and "window" in type(old).model_fields and old.window is not None:  # type: ignore[attr-defined]
        found["window"] = old.window  # type: ignore[attr-defined]
    offered = set(found)
    found = {option: value for option, value in found.items() if option not in table and option not in leave}
    try:
        new = registry.make({"type": name, **found, **table})
    except RecipeError as error:
        where, why = error.faults[0]
        raise MixerError(name, f"layer {layer}: {f'{where}: ' if where else ''}{why}") from None
    return block.model_copy(update={"mixer": new}), found, offered


def _free_name(name: str, blocks: Mapping[str, Any]) -> str:
    if name not in blocks:
        return name
    n = 2
    while f"{name}_{n}" in blocks:
        n += 1
    return f"{name}_{n}"


def _config(config: LanguageModelConfig, names: Sequence[str], blocks: Mapping[str, BlockConfig]) -> LanguageModelConfig:
    said = {name: getattr(config, name) for name in type(config).model_fields if getattr(config, name) is not None}
    used = {name: block for name, block in blocks.items() if name in names}
    return type(config)(**{**said, "pattern": print_pattern(names), "blocks": used})


# -- the weights -----------------------------------------------------------------------------------------------------------


def _mixer(model: LanguageModel, layer: int) -> nn.Module:
    part: nn.Module = model.stack.blocks()[layer].parts()["mixer"]
    return part


def _dtype(model: LanguageModel) -> torch.dtype:
    found = [p.dtype for p in model.parameters()]
    return max(set(found), key=found.count)


def _transfer(
    model: LanguageModel, built: LanguageModel, layers: Sequence[int], config: LanguageModelConfig
) -> dict[int, tuple[Piece, ...]]:
    """The mixers' weights; layers of one shared mixer are told of at the first."""
    found: dict[int, tuple[Piece, ...]] = {}
    done: set[str] = set()
    before, after = model.config.layers(), config.layers()
    for i in layers:
        if built.stack.order[i] in done:
            continue
        done.add(built.stack.order[i])
        old, new = model.config.blocks[before[i]].mixer, config.blocks[after[i]].mixer  # type: ignore[attr-defined]
        try:
            found[i] = transfer((old, _mixer(model, i)), (new, _mixer(built, i)))
        except ConfigError as error:
            raise MixerError(new.type_name(), f"layer {i}: {error}") from None
    return found


def _keep_others(model: LanguageModel, built: LanguageModel, layers: Sequence[int]) -> int:
    """Copy everything outside the replaced mixers; how many parameters that is."""
    own, theirs = _outside(model, layers), _outside(built, layers)
    for name in sorted(own.keys() | theirs.keys()):
        if name not in own or name not in theirs or own[name].shape != theirs[name].shape:
            raise ConfigError(f"{name} is of no replaced mixer, and would be another tensor: layers share what is replaced")
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(own[name])
    return sum(tensor.numel() for tensor in theirs.values())


def _outside(model: LanguageModel, layers: Sequence[int]) -> dict[str, Tensor]:
    inside = {id(tensor) for i in layers for tensor in canonical_tensors(_mixer(model, i)).values()}
    return {name: tensor for name, tensor in canonical_tensors(model).items() if id(tensor) not in inside}
