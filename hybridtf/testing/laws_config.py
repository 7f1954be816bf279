"""The config: every option away from its default survives being written down and read back."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hybridtf.core import ComponentConfig, HybridTFError, RecipeError, active
from hybridtf.core.config import ConfigTable
from hybridtf.testing.errors import ContractError

Table = TypeVar("Table", bound=ConfigTable)

UNKNOWN = "no_such_option"


def check_config(config_cls: type[ComponentConfig], base: ComponentConfig | None = None) -> None:
    """Round trip with every option away from its default, strictness, frozenness, schema, ``tiny()``.

    Raises :class:`ContractError`. ``base``: the instance to start from; ``tiny()`` unless given.
    """
    start = config_cls.tiny() if base is None else base
    if type(start) is not config_cls:
        raise ContractError(f"tiny() gives a {type(start).__name__}, not a {config_cls.__name__}")
    _no_hidden_none(config_cls)
    _same_after_trip(start, "tiny()")
    changed: dict[str, Any] = {}
    for name, info in config_cls.model_fields.items():
        if name == "type":
            continue
        try:
            change = _change(config_cls, start, name, info)
        except ContractError:
            if start == config_cls.tiny():
                raise
            continue  # what a preset fixes may exclude other values of an option; tiny() has shown them
        _same_after_trip(_with(config_cls, start, change), f"option {name!r}")
        changed |= change
    try:
        everything = _with(config_cls, start, changed)
    except (HybridTFError, ValidationError):
        everything = start  # options that exclude each other were already tried one by one
    _same_after_trip(everything, "all options at once")
    _refuses_unknown(config_cls, start)
    _is_frozen(start)
    schema = config_cls.model_json_schema()
    missing = set(config_cls.model_fields) - set(schema.get("properties", {}))
    if missing:
        raise ContractError(f"its JSON schema lacks {sorted(missing)}")


def options(config: ConfigTable) -> dict[str, Any]:
    """The options of a config by name, as Python values."""
    return {name: getattr(config, name) for name in type(config).model_fields}


def _with(cls: type[Table], base: Table, changes: dict[str, Any]) -> Table:
    given = {**options(base), **changes}
    return cls(**{name: value for name, value in given.items() if value is not None})


def _same_after_trip(config: ComponentConfig, what: str) -> None:
    cls = type(config)
    table = config.to_dict()
    try:
        table = json.loads(json.dumps(table))
    except TypeError as error:
        raise ContractError(f"{what}: to_dict() is not plain data: {error}") from error
    registry = active()[cls.kind]
    known = cls.type_name() in registry and registry.get(cls.type_name()) is cls
    back = registry.make(table) if known else cls(**table)
    if back != config:
        lost = [name for name in cls.model_fields if getattr(back, name) != getattr(config, name)]
        raise ContractError(f"{what}: written down and read back, {lost} changed")


def _no_hidden_none(cls: type[ComponentConfig]) -> None:
    for name, info in cls.model_fields.items():
        if type(None) in typing.get_args(info.annotation) and _default(info) is not None:
            raise ContractError(f"option {name!r} has a default and allows None, which a TOML file cannot say")


def _refuses_unknown(cls: type[ComponentConfig], base: ComponentConfig) -> None:
    try:
        _with(cls, base, {UNKNOWN: 1})
    except RecipeError as error:
        if UNKNOWN in str(error):
            return
        raise ContractError(f"refuses an unknown option without naming it: {error}") from error
    raise ContractError("accepts unknown options; keep extra='forbid'")


def _is_frozen(config: ComponentConfig) -> None:
    name = next(iter(type(config).model_fields))
    try:
        setattr(config, name, getattr(config, name))
    except ValidationError:
        return
    raise ContractError("is not frozen; keep frozen=True")


# -- values away from the default ------------------------------------------------------------------------------------


def _default(info: FieldInfo) -> Any:
    return None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})


def _changed_values(base: ComponentConfig, name: str, info: FieldInfo) -> Iterator[Any]:
    """Other values than the present one and the default, valid or not."""
    now = getattr(base, name)
    for value in (*(info.examples or ()), *candidates(info.annotation, now)):
        if value not in (now, _default(info)) and value is not None:
            yield value


def _is_valid(cls: type[ComponentConfig], base: ComponentConfig, changes: dict[str, Any]) -> bool:
    try:
        _with(cls, base, changes)
    except (HybridTFError, ValidationError):
        return False
    return True


def _change(cls: type[ComponentConfig], base: ComponentConfig, name: str, info: FieldInfo) -> dict[str, Any]:
    """The option ``name`` at its first valid value away from the default; and, where none is valid alone, one other option
    away from its own, without which this one does nothing and is refused."""
    try:
        return {name: _first_valid(cls, base, name, info)}
    except ContractError:
        for other, about in cls.model_fields.items():
            for beside in () if other in (name, "type") else _changed_values(base, other, about):
                for value in _changed_values(base, name, info):
                    if _is_valid(cls, base, both := {name: value, other: beside}):
                        return both
        raise


def _first_valid(cls: type[ComponentConfig], base: ComponentConfig, name: str, info: FieldInfo) -> Any:
    for value in _changed_values(base, name, info):
        if _is_valid(cls, base, {name: value}):
            return value
    now, default = getattr(base, name), _default(info)
    if now is not None and now != default:
        return now  # a preset's switch, whose only other value is the default
    raise ContractError(f"found no second valid value for option {name!r}: give it Field(examples=[...])")


def candidates(annotation: Any, now: Any) -> Iterator[Any]:
    """Values of an annotated type, likely ones first."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from candidates(args[0], now)
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            if arg is not type(None):
                yield from candidates(arg, now)
    elif origin is typing.Literal:
        yield from args
    elif origin is tuple:
        yield from _tuples(args, now)
    elif origin is dict or annotation is dict:
        one = next(iter(now.values()), None) if isinstance(now, dict) else None
        for value in candidates(args[1] if args else int, one):
            yield dict.fromkeys(now, value) if now else {"one": value}
    elif isinstance(annotation, type) and issubclass(annotation, ComponentConfig):
        yield from (cls.tiny() for cls in active()[annotation.kind].configs().values() if issubclass(cls, annotation))
        if isinstance(now, ComponentConfig):
            yield from _variants(now)
    elif isinstance(annotation, type) and issubclass(annotation, ConfigTable):
        if isinstance(now, ConfigTable):
            yield from _variants(now)
    else:
        yield from _plain_candidates(annotation, now)


def _variants(config: Table) -> Iterator[Table]:
    """The same table with one option changed."""
    cls = type(config)
    for name, info in cls.model_fields.items():
        for value in () if name == "type" else candidates(info.annotation, getattr(config, name)):
            try:
                yield _with(cls, config, {name: value})
            except (HybridTFError, ValidationError):
                continue


def _tuples(args: tuple[Any, ...], now: Any) -> Iterator[tuple[Any, ...]]:
    if len(args) == 2 and args[1] is Ellipsis:
        for value in candidates(args[0], now[0] if now else None):
            yield (value,) * max(len(now or ()), 1)
            yield (value, *(now or ())[1:])
        return
    if all(arg in (int, float) for arg in args):
        # Pairs are often bounds: rising numbers near the present ones first.
        base = now if isinstance(now, tuple) else tuple(0.25 * (i + 1) for i in range(len(args)))
        yield tuple(arg(2 * x if arg is int else 1.25 * x) for arg, x in zip(args, base, strict=True))
    current = now if isinstance(now, tuple) else (None,) * len(args)
    choices = [list(candidates(arg, item)) for arg, item in zip(args, current, strict=True)]
    yield from zip(*choices, strict=False)


def _plain_candidates(annotation: Any, now: Any) -> Iterator[Any]:
    if annotation is bool:
        yield not now
    elif annotation is int:
        n = now if isinstance(now, int) else 2
        yield from (2 * n, n + 1, n - 1, n // 2, 1, 2, 3, 4, 0)
    elif annotation is float:
        x = now if isinstance(now, float) else 0.25
        yield from (x / 2, x * 2, x / 4 + 0.1, 0.5, 0.1, 1.5, 2.0)
    elif annotation is str:
        yield from ("reference", "other", "a")


def option_variants(config: ComponentConfig) -> Iterator[tuple[str, ComponentConfig]]:
    """The config with one option at a time away from its default, by the option's name, and with it the option without which
    it does nothing, if any; a position becomes each other one, since its site decides which of them fit."""
    cls = type(config)
    for name, info in cls.model_fields.items():
        now = getattr(config, name)
        if isinstance(now, ComponentConfig) and now.kind == "positions":
            for other, position in active()["positions"].configs().items():
                if other != now.type_name():
                    yield f"{name}-{other}", _with(cls, config, {name: position.tiny()})
        elif name != "type":
            yield name, _with(cls, config, _change(cls, config, name, info))


def preset_config(kind: str, name: str) -> ComponentConfig:
    """A small config of a preset: its base's ``tiny()`` with the preset's options, and values for those it requires."""
    registry = active()[kind]
    preset = registry.presets()[name]
    cls = registry.get(name)
    base = cls.tiny()
    table = {key: value for key, value in base.to_dict().items() if key not in preset.options and key != "type"}
    for key in preset.requires:
        if key not in table:
            table[key] = _plain_table(_first_valid(cls, base, key, cls.model_fields[key]))
    return registry.make({**table, "type": name})


def _plain_table(value: Any) -> Any:
    return value.to_dict() if isinstance(value, ComponentConfig) else value
