"""The space of a search: a recipe's blocks, the slots that they may stand in, and options to choose.

A space file is data alone: a recipe without a pattern and a task, and a section ``[search]``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field

from hybridtf.core import ConfigTable, RecipeError, active, known_names
from hybridtf.recipe import Recipe, apply_overrides, parse_recipe
from hybridtf.recipe.load import SPACE_ENDING, read_table
from hybridtf.train import TrainConfig

Value: TypeAlias = bool | int | float | str

MOST = 100_000
"""Stacks in a space: they are all listed, so that none is tried twice and the end is known."""
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")


class SearchConfig(ConfigTable):
    """``[search]``: what may change.

    ``slots``: for each layer from the bottom up the names of the blocks that may stand there. ``repeat``: the slots so many
    times over, each time alike. ``at_least``, ``at_most``: how many of the slots a block may fill. ``choices``: values of
    options of blocks, by path such as ``"d.mixer.n_heads"``; a block has one value in all its layers.
    """

    slots: tuple[tuple[str, ...], ...] = Field(min_length=1)
    repeat: int = Field(default=1, ge=1)
    at_least: dict[str, int] = Field(default_factory=dict)
    at_most: dict[str, int] = Field(default_factory=dict)
    choices: dict[str, tuple[Value, ...]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Stack:
    """A point of a space: the block of each slot, and the values of the options of those blocks, by path."""

    blocks: tuple[str, ...]
    choices: tuple[tuple[str, Value], ...] = ()

    @property
    def name(self) -> str:
        """What records call it: ``d w a, d.mixer.n_heads=4``."""
        return ", ".join([" ".join(self.blocks), *(f"{path}={_text(value)}" for path, value in self.choices)])


@dataclass(frozen=True)
class Space:
    """A space that was checked: ``table`` is the recipe's part of the file, ``source`` begins the messages."""

    source: str
    table: Mapping[str, Any]
    search: SearchConfig
    stacks: tuple[Stack, ...] = field(init=False)
    """All legal stacks, in the order of the file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stacks", tuple(self._listed()))

    def choices_of(self, blocks: Sequence[str]) -> dict[str, tuple[Value, ...]]:
        """The options that a stack of these blocks has to choose."""
        return {path: values for path, values in self.search.choices.items() if path.partition(".")[0] in blocks}

    def recipe(self, stack: Stack) -> Recipe:
        """The stack as a recipe, with the blocks that it uses alone. Raises :class:`RecipeError` where an option that was
        chosen does not fit the others."""
        model = dict(self.table["model"])
        model["blocks"] = {name: block for name, block in model["blocks"].items() if name in stack.blocks}
        pattern = " ".join(stack.blocks)
        model["pattern"] = f"({pattern})*{self.search.repeat}" if self.search.repeat > 1 else pattern
        overrides = [f"model.blocks.{path}={_text(value)}" for path, value in stack.choices]
        table = apply_overrides({**self.table, "model": model}, overrides)
        return parse_recipe(table, f"{self.source}, {stack.name}", sections={"train": TrainConfig})

    def _listed(self) -> Iterator[Stack]:
        count = 0
        for blocks in itertools.product(*self.search.slots):
            if not self._kept(blocks):
                continue
            offered = self.choices_of(blocks)
            for values in itertools.product(*offered.values()):
                count += 1
                if count > MOST:
                    many = f"more than {MOST:,} stacks; give fewer slots, blocks or choices"
                    raise RecipeError(self.source, [("search", many)])
                yield Stack(blocks, tuple(zip(offered, values, strict=True)))
        if not count:
            raise RecipeError(self.source, [("search", "no stack keeps at_least and at_most")])

    def _kept(self, blocks: Sequence[str]) -> bool:
        least, most = self.search.at_least, self.search.at_most
        return all(blocks.count(name) >= n for name, n in least.items()) and all(
            blocks.count(name) <= n for name, n in most.items()
        )


def space_names() -> dict[str, Path]:
    """The installed spaces by name: their path inside their folder of recipes, without the ending."""
    names: dict[str, Path] = {}
    for folder in active().recipe_folders:
        for file in sorted(folder.rglob(f"*{SPACE_ENDING}")):
            names.setdefault(file.relative_to(folder).as_posix().removesuffix(SPACE_ENDING), file)
    return names


def load_space(source: str | Path) -> Space:
    """The space of a file, or of a name among the installed ones. Raises :class:`RecipeError` with every fault."""
    if isinstance(source, str) and not source.endswith(".toml") and not Path(source).exists():
        names = space_names()
        if source not in names:
            raise RecipeError("", [("", f"no space named {source!r}. {known_names(source, names)}")])
        source = names[source]
    table, path = read_table(source)
    return parse_space(table, path)


def parse_space(table: Mapping[str, Any], source: str = "") -> Space:
    """The space of a plain table; ``source`` begins the messages. See :func:`load_space`."""
    rest = {name: section for name, section in table.items() if name != "search"}
    model = table.get("model")
    blocks = model.get("blocks") if isinstance(model, Mapping) else None
    faults = _misplaced(table, model, blocks)
    if faults:
        raise RecipeError(source, faults)
    assert isinstance(model, Mapping)
    assert isinstance(blocks, Mapping)
    faults, search = [], None
    try:
        search = SearchConfig(**table["search"])
    except RecipeError as error:
        faults += [(f"search.{where}" if where else "search", message) for where, message in error.faults]
    if search is not None:
        faults += _unknown(search, blocks)
    try:  # every block once: what is wrong with one that few stacks use is said before any is trained
        parse_recipe({**rest, "model": {**model, "pattern": " ".join(blocks)}}, source, sections={"train": TrainConfig})
    except RecipeError as error:
        faults += error.faults
    if faults or search is None:
        raise RecipeError(source, faults)
    return Space(source, rest, search)


def _misplaced(table: Mapping[str, Any], model: Any, blocks: Any) -> list[tuple[str, str]]:
    """Sections that are missing, and those that a search gives itself."""
    faults = []
    if not isinstance(table.get("search"), Mapping):
        faults.append(("search", "there is no section [search]; a space of stacks has one"))
    if not isinstance(blocks, Mapping) or not blocks:
        faults.append(("model.blocks", "there are no blocks to choose from"))
    faults += [
        (f"model.{name}", f"the search makes {name} out of search.slots; leave it out")
        for name in ("pattern", "n_layers") if isinstance(model, Mapping) and name in model
    ]
    if "task" in table:
        faults.append(("task", "a search names its tasks itself; leave it out"))
    if "train" not in table:
        faults.append(("train", "there is no section [train]; every stack is trained as it says"))
    return faults


def _unknown(search: SearchConfig, blocks: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names that no block has, blocks that no slot takes, and choices between nothing."""
    faults, taken = [], set(itertools.chain(*search.slots))
    named = [(f"search.slots[{i}]", name) for i, slot in enumerate(search.slots) for name in slot]
    named += [(f"search.{w}.{n}", n) for w in ("at_least", "at_most") for n in getattr(search, w)]
    named += [(f'search.choices."{path}"', path.partition(".")[0]) for path in search.choices]
    faults += [(where, f"no block {name!r}. {known_names(name, blocks)}") for where, name in named if name not in blocks]
    for i, slot in enumerate(search.slots):
        if not slot or len(set(slot)) < len(slot):
            faults.append((f"search.slots[{i}]", "must name blocks, each once"))
    faults += [
        (f"model.blocks.{name}", "no slot takes this block; name it in search.slots or take it out")
        for name in blocks if name not in taken
    ]
    for path, values in search.choices.items():
        if not _PATH.fullmatch(path):
            faults.append((f'search.choices."{path}"', 'must be a block and an option of it, such as "d.mixer.n_heads"'))
        if len(set(map(repr, values))) < max(len(values), 2):
            faults.append((f'search.choices."{path}"', "must be at least two values that differ"))
    return faults


def _text(value: Value) -> str:
    """As TOML; JSON writes these alike."""
    return json.dumps(value, ensure_ascii=False)
