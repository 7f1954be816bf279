"""From a file, a name or a plain table to a :class:`Recipe`, with every fault of it at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hybridtf.core import RecipeError, active, known_names, nearest
from hybridtf.core.config import faults_of, tuples
from hybridtf.recipe.faults import Fault, pattern_faults, with_places
from hybridtf.recipe.overrides import apply_overrides
from hybridtf.recipe.tables import DISTRIBUTION, Recipe

Sections = Mapping[str, type[BaseModel]]

SPACE_ENDING = ".space.toml"
"""Of files that hold a space of recipes to search, and so are no recipe themselves."""


def load_recipe(source: str | Path, overrides: Sequence[str] = (), *, sections: Sections | None = None) -> Recipe:
    """The recipe of a file, or of a name among the installed recipes (``demo/hybrid``), with ``path=value`` overrides.

    ``sections`` gives the class of a table that rooms above validate: with ``{"train": TrainConfig}`` the faults of
    ``train`` come together with all others, and ``recipe.train`` is the config. Raises :class:`RecipeError` with every
    fault: path in the file, what is wrong, what is allowed, the nearest name.
    """
    table, path = read_table(source)
    return parse_recipe(apply_overrides(table, overrides), path, sections=sections)


def read_table(source: str | Path) -> tuple[dict[str, Any], str]:
    """The table of a recipe's file or name as it stands there, not validated, and the path that its messages begin with.

    Raises :class:`RecipeError` where there is no such recipe or it is no TOML.
    """
    path = _find(source)
    return _read(path), str(path)


def parse_recipe(table: Mapping[str, Any], source: str = "", *, sections: Sections | None = None) -> Recipe:
    """The recipe of a plain table; ``source`` begins the messages. See :func:`load_recipe`."""
    sections = sections or {}
    if missing := _missing_plugins(table):
        # First and alone: without its plugins most of a recipe would only look wrong.
        raise RecipeError(source, missing)
    filled = dict(table)
    faults: list[Fault] = []
    for name, config in sections.items():
        if isinstance(table.get(name), Mapping):
            filled[name], found = _section(config, table[name], name)
            faults += found
    recipe = None
    try:
        recipe = Recipe(**filled)
    except RecipeError as error:
        faults = error.faults + faults
    faults += pattern_faults(table.get("model"), "model")
    if faults or recipe is None:
        raise RecipeError(source, with_places(faults, table, sections))
    return recipe


def _section(config: type[BaseModel], table: Mapping[str, Any], name: str) -> tuple[Any, list[Fault]]:
    try:
        return config(**tuples(dict(table))), []
    except RecipeError as error:
        faults = error.faults
    except ValidationError as error:
        faults = faults_of(error, config)
    return table, [(f"{name}.{path}" if path else name, message) for path, message in faults]


def _missing_plugins(table: Mapping[str, Any]) -> list[Fault]:
    meta = table.get("meta")
    requires = meta.get("requires") if isinstance(meta, Mapping) else None
    faults = []
    for name in requires if isinstance(requires, list | tuple) else ():
        if not isinstance(name, str) or not DISTRIBUTION.fullmatch(name):
            continue  # the validation says what is wrong with it
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            faults.append(("meta.requires", f"{name!r} is not installed: pip install {name}"))
            continue
        brought = metadata.distribution(name).entry_points.select(group="hybridtf").names
        if brought and brought.isdisjoint({*active().plugins, *active().failures}):
            why = "is HYBRIDTF_DISABLE_PLUGIN_AUTOLOAD set?"
            faults.append(("meta.requires", f"{name!r} is installed, but installed plugins are not loaded here; {why}"))
        if name in active().failures:
            cause = active().failures[name]
            faults.append(("meta.requires", f"the plugin {name!r} is installed but was not loaded: {cause}"))
    return faults


# -- files and names ---------------------------------------------------------------------------------------------------


def recipe_names() -> dict[str, Path]:
    """The installed recipes by name: their path inside their folder, without the ending."""
    names: dict[str, Path] = {}
    for folder in active().recipe_folders:
        for file in sorted(folder.rglob("*.toml")):
            if file.name.endswith(SPACE_ENDING):
                continue
            names.setdefault(file.relative_to(folder).with_suffix("").as_posix(), file)
    return dict(sorted(names.items()))


def _find(source: str | Path) -> Path:
    path = Path(source)
    if isinstance(source, str) and path.suffix != ".toml" and not path.is_file():
        names = recipe_names()
        if source in names:
            return names[source]
        if not path.exists():
            raise RecipeError("", [("", f"no recipe named {source!r}. {known_names(source, names, 'hybridtf list recipes')}")])
    if path.is_dir():
        raise RecipeError(str(path), [("", "is a directory; a recipe is a .toml file")])
    if path.is_symlink() and not path.exists():
        raise RecipeError(str(path), [("", f"is a link to {str(path.readlink())!r}, which is not there")])
    if not path.exists():
        here = sorted(file.name for file in path.parent.glob("*.toml") if file.exists()) if path.parent.is_dir() else []
        near = nearest(path.name, here)
        shipped = path.with_suffix("").as_posix() in recipe_names()
        hint = f" Did you mean {str(path.parent / near)!r}?" if near else ""
        hint += f" An installed recipe is called {path.with_suffix('').as_posix()!r}." if shipped else ""
        raise RecipeError(str(path), [("", f"there is no such file.{hint}".removesuffix("."))])
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(str(path), [("", f"cannot be read: {error.strerror or error}")]) from None
    try:
        # Some editors of Windows begin a file with a byte-order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        fault = f"is not UTF-8 text: byte 0x{data[error.start]:02x}"
        raise RecipeError(f"{path}:{line}:{column}", [("", fault)]) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from None


def _syntax_error(path: Path, text: str, message: str) -> RecipeError:
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.DOTALL)
    reason, line, column = found.groups() if found else (message, None, None)
    if line is None:
        lines = text.split("\n")
        line, column = len(lines), len(lines[-1]) + 1
    return RecipeError(f"{path}:{line}:{column}", [("", f"is no TOML: {reason[:1].lower()}{reason[1:]}")])
