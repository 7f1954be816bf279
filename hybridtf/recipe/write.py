"""Recipes as TOML text. A writer of our own, since the layout is what people read: blocks as sections, parts inline."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybridtf.core import ConfigError
from hybridtf.recipe.tables import Recipe

MAX_WIDTH = 120
"""A table that would make a longer line becomes a section of its own."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(recipe: Recipe | Mapping[str, Any]) -> str:
    """The text of a recipe (or of a plain table): every option written out, presets as their base type.

    Loading it gives an equal recipe. Raises :class:`ConfigError` for a value that TOML cannot hold.
    """
    table = recipe.to_dict() if isinstance(recipe, Recipe) else recipe
    if isinstance(recipe, Recipe):
        # An empty text says nothing in the part of the recipe that is for people.
        table = {**table, "meta": {key: value for key, value in table["meta"].items() if value not in ("", [])}}
        table = {name: section for name, section in table.items() if name != "meta" or section}
    return "\n".join(_table(table, ())).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    sections = {key: value for key, value in table.items() if _is_section(key, value, path, table)}
    plain = {key: value for key, value in table.items() if key not in sections}
    lines = [f"{_key(key, path)} = {_value(value, (*path, key))}" for key, value in plain.items()]
    if path and (lines or not sections):
        yield f"\n[{'.'.join(_key(key, path) for key in path)}]"
    yield from lines
    for key, value in sections.items():
        yield from _table(value, (*path, key))


def _is_section(key: str, value: Any, path: tuple[str, ...], table: Mapping[str, Any]) -> bool:
    if not isinstance(value, Mapping):
        return False
    tables_alone = all(isinstance(item, Mapping) for item in table.values())
    of_tables = bool(value) and all(isinstance(item, Mapping) for item in value.values())
    return not path or tables_alone or of_tables or len(f"{key} = {_value(value, (*path, key))}") > MAX_WIDTH


def _key(key: Any, path: tuple[str, ...]) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{'.'.join(path)}: a key must be a string, not {key!r}")
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; TOML also wants the delete character escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key, path)} = {_value(item, (*path, key))}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    raise ConfigError(f"{'.'.join(path)}: TOML cannot hold {value!r}")
