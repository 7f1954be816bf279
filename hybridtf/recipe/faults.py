"""Faults of a recipe beyond one config: keys in the wrong section, unknown sections, patterns that do not come out."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hybridtf.core import ComponentConfig, ConfigError, active, known_names
from hybridtf.core.config import UNKNOWN_OPTION
from hybridtf.models.pattern import expand_pattern
from hybridtf.recipe.tables import Recipe

Fault = tuple[str, str]
"""The path in the file, and what is wrong there."""


def with_places(faults: list[Fault], table: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]) -> list[Fault]:
    """The faults, with unknown options that belong elsewhere told where, and unknown sections called so."""
    places = dict(_places(table, sections))
    return [(path, _placed(path, message, table, places)) for path, message in faults]


def _placed(path: str, message: str, table: Mapping[str, Any], places: Mapping[str, type[BaseModel]]) -> str:
    if not message.startswith(UNKNOWN_OPTION):
        return message
    parent, _, key = path.rpartition(".")
    home = _home(key, parent, places)
    if home is not None:
        known = places[parent].model_fields if parent in places else Recipe.model_fields
        here = ", ".join(sorted(name for name in known if name != "type"))
        return f"{UNKNOWN_OPTION} here; it belongs to {home}. Known here: {here}"
    if not parent:
        what = "section" if isinstance(table.get(key), Mapping) else "option outside a section"
        return f"unknown {what}. {known_names(key, Recipe.model_fields)}"
    return message


def _home(key: str, parent: str, places: Mapping[str, type[BaseModel]]) -> str | None:
    """The table nearest to ``parent`` that has an option ``key``."""
    homes = [path for path, config in places.items() if path != parent and key != "type" and key in config.model_fields]
    at = parent.split(".")

    def shared(path: str) -> int:
        return sum(1 for _ in _common(path.split("."), at))

    return max(homes, key=lambda path: (shared(path), -path.count(".")), default=None)


def _common(left: list[str], right: list[str]) -> Iterator[str]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return
        yield a


def _places(table: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every table of the recipe whose config is known, by path; sections that the file lacks count too."""
    for name, field in Recipe.model_fields.items():
        if name in sections:
            yield from _inside(name, sections[name], table.get(name, {}))
        else:
            yield from _inside(name, field.annotation, table.get(name, {}))


def _inside(path: str, annotation: Any, value: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _inside(path, args[0], value)
    elif origin in (typing.Union, types.UnionType):
        for arm in args:
            yield from _inside(path, arm, value)
    elif origin is dict and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(f"{path}.{key}", args[1], item)
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _inside(f"{path}[{i}]", args[0], item)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(value, Mapping):
        config = _config_of(annotation, value)
        if config is not None:
            yield path, config
            for name, field in config.model_fields.items():
                if name in value:
                    yield from _inside(f"{path}.{name}", field.annotation, value[name])


def _config_of(annotation: type[BaseModel], value: Mapping[str, Any]) -> type[BaseModel] | None:
    if not (issubclass(annotation, ComponentConfig) and annotation.kind):
        return annotation
    registry = active()[annotation.kind]
    name = value.get("type", annotation.default_type)
    return registry.get(name) if isinstance(name, str) and name in registry else None


def pattern_faults(table: Any, path: str) -> Iterator[Fault]:
    """What is wrong with the patterns of a model's table, wherever a ``pattern`` stands beside its ``blocks``.

    Read from the plain table, so that they are said together with the faults of the blocks themselves.
    """
    if not isinstance(table, Mapping):
        return
    pattern, blocks, n_layers = table.get("pattern"), table.get("blocks"), table.get("n_layers")
    counted = n_layers is None or (type(n_layers) is int and n_layers > 0)
    if isinstance(pattern, str) and isinstance(blocks, Mapping) and counted:
        try:
            layers = set(expand_pattern(pattern, list(blocks), n_layers))
        except ConfigError as error:
            yield f"{path}.pattern", str(error)
        else:
            for name in blocks:
                if name not in layers:
                    unused = f"no layer of the pattern {pattern!r} uses this block; use it or take it out"
                    yield f"{path}.blocks.{name}", unused
    for key, value in table.items():
        yield from pattern_faults(value, f"{path}.{key}")
