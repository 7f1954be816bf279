"""``list``, ``plugins``, ``schema``: what is installed."""

from __future__ import annotations

import inspect
import json
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json
from hybridtf.cli.output import add_row, make_table, print_json, print_table, print_text, say
from hybridtf.cli.sources import registries

if TYPE_CHECKING:
    from hybridtf.core import ComponentConfig, Registries

EXTRA_KINDS = ("kernels", "recipes", "failures")
"""What ``list`` shows beside the registries of components."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("list")(list_installed)
    app.command("plugins")(plugins)
    app.command("schema")(schema)


def list_installed(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="mixers, blocks, kernels, recipes, ...; all if not given.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the options of every component.")] = False,
    json: Json = False,
) -> None:
    """List mixers, blocks, kernels, tasks, recipes and the rest."""
    from hybridtf.core import ConfigError, known_names

    found = catalogue(registries())
    if kind is not None:
        if kind not in found:
            raise ConfigError(f"no kind named {kind!r}. {known_names(kind, found)}")
        found = {kind: found[kind]}
    if json:
        print_json(found)
        return
    for name, entries in found.items():
        if entries or kind is not None:
            _print_kind(name, entries, verbose)


def catalogue(found: Registries) -> dict[str, dict[str, Any]]:
    """Registry name -> entries by name, as plain data."""
    out = {kind: _components(found, kind) for kind in found.by_kind}
    out["kernels"] = {
        f"{op}/{kernel.name}": {"op": op, "name": kernel.name, "priority": kernel.priority}
        for op in found.kernels.ops()
        for kernel in found.kernels.of(op)
    }
    out["recipes"] = _recipes()
    out["failures"] = {name: {"reason": reason} for name, reason in found.failures.items()}
    return out


def _components(found: Registries, kind: str) -> dict[str, Any]:
    registry = found[kind]
    entries: dict[str, Any] = {}
    for name in registry.names():
        config = registry.get(name)
        preset = registry.presets().get(name)
        entry: dict[str, Any] = {"plugin": registry.origin(name), "description": one_line(config)}
        if preset is not None:
            entry["preset_of"] = preset.type
            entry["fixed"] = {key: _plain(value) for key, value in preset.options.items()}
            entry["requires"] = list(preset.requires)
        entry["cannot"] = _cannot(kind, config)
        if kind == "mixers":
            entry |= _facts(found, name)
        entry["options"] = _options(config)
        entries[name] = entry
    return entries


def one_line(config: type[ComponentConfig]) -> str:
    """The first sentence of a config's own docstring."""
    # Not inspect.getdoc: a class without a docstring would show its base's.
    paragraph = inspect.cleandoc(config.__dict__.get("__doc__") or "").partition("\n\n")[0]
    sentence, end, _ = " ".join(paragraph.split()).replace("``", "").partition(". ")
    return sentence + end.strip()


def _cannot(kind: str, config: type[ComponentConfig]) -> dict[str, str]:
    """The laws that the component itself declares that it breaks; parts inside it are listed on their own."""
    import torch

    from hybridtf.testing import ContractError, NotApplicableError, Subject
    from hybridtf.testing.run import PLUGIN_FAULTS

    if kind == "tasks":
        return {}
    try:
        module = Subject(kind, config.tiny()).build_plain(device=torch.device("meta"))
    except (*PLUGIN_FAULTS, ContractError, NotApplicableError):
        return {}  # `check` says what is wrong with a component that cannot be built
    return dict(getattr(module, "cannot", {}))


def _facts(found: Registries, name: str) -> dict[str, Any]:
    """Where a mixer comes from, its ops, how its state grows and how its time does; of a preset, those with its options.

    Of a combinator ops and time are None, and so is its state where it has one: they are those of what it holds.
    """
    from hybridtf.core import SequenceMixerConfig
    from hybridtf.testing import ContractError, NotApplicableError, mixer_facts, preset_config
    from hybridtf.testing.run import PLUGIN_FAULTS

    registry = found["mixers"]
    facts: dict[str, Any] = dict.fromkeys(("source", "ops", "state", "time_exponent", "combinator"))
    try:
        config = preset_config("mixers", name) if name in registry.presets() else registry.get(name).tiny()
        if isinstance(config, SequenceMixerConfig):
            known = mixer_facts(config)
            facts = {key: getattr(known, key) for key in facts} | {"ops": list(known.ops)}
            if known.combinator:  # what was built here holds examples
                facts |= {"ops": None, "time_exponent": None, "state": "none" if known.state == "none" else None}
    except (*PLUGIN_FAULTS, ContractError, NotApplicableError):
        pass  # `check` says what is wrong with a component that cannot be built
    return facts


def _options(config: type[ComponentConfig]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        if name != "type":
            out[name] = {"type": _type_words(field.annotation), "required": field.is_required()}
            if not field.is_required():
                out[name]["default"] = _plain(field.get_default(call_default_factory=True, validated_data={}))
    return out


def _type_words(annotation: Any) -> str:
    """A type as a person reads it: a component by its base, a number without its bounds, a choice of tables by their types."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        names: Any = getattr(inside[1], "names", None)
        return " | ".join(sorted(names())) if callable(names) else _type_words(inside[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_words, inside))
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) if isinstance(value, str) else str(value) for value in inside)
    if annotation is ... or annotation is type(None):
        return "..." if annotation is ... else "none"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    return f"{origin.__name__}[{', '.join(map(_type_words, inside))}]" if origin is not None and inside else name


def _plain(value: Any) -> Any:
    from hybridtf.core import ComponentConfig

    if isinstance(value, ComponentConfig):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _recipes() -> dict[str, Any]:
    import tomllib

    from hybridtf.recipe import recipe_names

    out: dict[str, Any] = {}
    for name, path in recipe_names().items():
        try:
            meta = tomllib.loads(path.read_text(encoding="utf-8")).get("meta", {})
        except (OSError, ValueError):
            meta = {}  # `check NAME` says what is wrong with the file
        words = {key: str(meta.get(key, "")) for key in ("title", "description")}
        out[name] = {"path": str(path), **words}
    return out


# -- for people --------------------------------------------------------------------------------------------------------


def _print_kind(kind: str, entries: dict[str, Any], verbose: bool) -> None:
    if kind == "kernels":
        table = make_table("op", "kernel", "priority", title=kind, right=("priority",))
        for entry in entries.values():
            add_row(table, entry["op"], entry["name"], entry["priority"])
    elif kind == "recipes":
        table = make_table("name", "title", "path" if verbose else "description", title=kind)
        for name, entry in entries.items():
            add_row(table, name, entry["title"], entry["path" if verbose else "description"])
    elif kind == "failures":
        table = make_table("plugin", "not loaded because", title="plugins that failed")
        for name, entry in entries.items():
            add_row(table, name, entry["reason"])
    else:
        table = _component_table(kind, entries, verbose)
    print_table(table)


def _component_table(kind: str, entries: dict[str, Any], verbose: bool) -> Any:
    notes = any(entry["cannot"] for entry in entries.values())
    facts = ("state", "time") if kind == "mixers" else ()
    more = (*facts, *(("cannot",) if notes else ()))
    table = make_table("name", "from", "what it is", *more, title=kind.replace("_", " "))
    for name, entry in entries.items():
        what = entry["description"]
        if "preset_of" in entry:
            fixed = ", ".join(f"{key} = {_short(value)}" for key, value in entry["fixed"].items())
            needed = ", ".join(entry["requires"])
            what = f"{entry['preset_of']}{f' with {fixed}' if fixed else ''}{f'; needs {needed}' if needed else ''}"
        cannot = "; ".join(f"{law}: {reason}" for law, reason in entry["cannot"].items())
        known = _growth(entry) if facts else ()
        add_row(table, name, entry["plugin"], what, *known, *((cannot,) if notes else ()))
        if verbose and "preset_of" not in entry:
            for option, about in entry["options"].items():
                value = "required" if about["required"] else f"= {_short(about['default'])}"
                add_row(table, f"  {option}", "", f"{about['type']} {value}", *("",) * len(more))
    return table


def _growth(entry: dict[str, Any]) -> tuple[str, str]:
    """The cells ``state`` and ``time`` of a mixer."""
    if entry["combinator"]:
        return entry["state"] or "of what it holds", "of what it holds"
    return entry["state"] or "", _power(entry["time_exponent"])


def _power(exponent: float | None) -> str:
    """How time grows with the length n, as a person writes it."""
    return "" if exponent is None else "n" if exponent == 1 else f"n^{exponent:g}"


def _short(value: Any) -> str:
    """An option's value as a recipe has it; tables by their type or number."""
    if isinstance(value, dict):
        return str(value.get("type", "a table"))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return f"{len(value)} tables" if len(value) > 1 else "a table"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def plugins(json: Json = False) -> None:
    """Show the plugins and what each adds.

    A plugin that was not loaded is shown with the reason, and the exit code is 1.
    """
    found = registries()
    added: dict[str, dict[str, list[str]]] = {name: {} for name in found.plugins}
    for kind, registry in found.by_kind.items():
        for name in registry.names():
            added.setdefault(registry.origin(name), {}).setdefault(kind, []).append(name)
    for plugin, adds in added.items():
        if kernels := found.kernels_of(plugin):
            adds["kernels"] = [f"{kernel.op}/{kernel.name}" for kernel in kernels]
    _print_plugins(found, added, json)
    if found.failures:
        raise typer.Exit(1)


def _print_plugins(found: Registries, added: dict[str, dict[str, list[str]]], json: bool) -> None:
    if json:
        print_json(
            {
                "plugins": {name: {"version": found.plugins.get(name, ""), "adds": adds} for name, adds in added.items()},
                "failures": dict(found.failures),
            }
        )
        return
    table = make_table("plugin", "version", "adds")
    for name, adds in added.items():
        words = [_adds(kind.replace("_", " "), names) for kind, names in adds.items()]
        add_row(table, name, found.plugins.get(name, ""), "; ".join(words) or "recipes only")
    print_table(table)
    if found.failures:
        _print_kind("failures", {name: {"reason": reason} for name, reason in found.failures.items()}, False)


def _adds(kind: str, names: list[str]) -> str:
    return f"{kind} {', '.join(names)}" if len(names) <= 3 else f"{len(names)} {kind}"


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file; default: stdout.")
    ] = None,
) -> None:
    """Print the JSON Schema of recipes, for editors.

    It is over what is installed here, plugins included.
    """
    import json

    from hybridtf.core.files import atomic_file
    from hybridtf.recipe import recipe_schema
    from hybridtf.train import TrainConfig

    registries()
    text = json.dumps(recipe_schema({"train": TrainConfig}), indent=2)
    if output is None:
        print_text(text)
        return
    with atomic_file(output) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    say(f"schema written to {output}")
