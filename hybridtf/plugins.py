"""The plugin manager: built-ins and installed plugins through the same hooks, each plugin kept apart from the rest.

Built-in rooms are named by string and registered first; a failing one raises, since that is our own bug. Installed
plugins come from the entry-point group ``hybridtf``, unless ``HYBRIDTF_DISABLE_PLUGIN_AUTOLOAD=1``. A plugin that fails
to load adds nothing at all, and is listed with the cause in ``Registries.failures``; everything else works.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pluggy

from hybridtf import core, hookspecs
from hybridtf.core.errors import one_line
from hybridtf.core.origins import cause
from hybridtf.core.registry import BUILT_IN, own_version

GROUP = "hybridtf"
"""The entry-point group of plugins."""

DISABLE = "HYBRIDTF_DISABLE_PLUGIN_AUTOLOAD"
"""The environment variable that keeps installed plugins from loading."""

BUILT_INS: tuple[str, ...] = (
    "hybridtf.ops", "hybridtf.nn", "hybridtf.mixers", "hybridtf.channel_mixers", "hybridtf.blocks", "hybridtf.models",
    "hybridtf.tasks", "hybridtf.recipe",
)
"""Rooms whose ``__init__`` implements hooks."""

BASES: Mapping[str, type[core.ComponentConfig]] = {
    base.kind: base
    for base in (
        core.SequenceMixerConfig, core.ChannelMixerConfig, core.BlockConfig, core.NormConfig, core.PositionConfig,
        core.StemConfig, core.HeadConfig, core.ModelConfig, core.TaskConfig,
    )
}
"""The base that a config of each kind must subclass."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class PluginManager(pluggy.PluginManager):
    """pluggy's manager, which also knows versions and which plugins could not be imported."""

    def __init__(self) -> None:
        super().__init__("hybridtf")
        self.add_hookspecs(hookspecs)
        self.versions: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.built_in: set[str] = set()

    def version(self, name: str) -> str:
        """The version of a plugin: its distribution's, else its ``__version__``, else ``local``."""
        return self.versions.get(name) or str(getattr(self.get_plugin(name), "__version__", "local"))


def hook_names() -> tuple[str, ...]:
    """The hooks that hybridtf has."""
    return tuple(sorted(name for name in vars(hookspecs) if name.startswith("hybridtf_")))


def make_plugin_manager(autoload: bool | None = None) -> PluginManager:
    """A fresh manager with the built-ins, then the installed plugins.

    ``autoload``: load installed plugins; None: unless ``HYBRIDTF_DISABLE_PLUGIN_AUTOLOAD`` is set to something but 0.
    """
    manager = PluginManager()
    for room in BUILT_INS:
        manager.register(importlib.import_module(room), room)
        manager.built_in.add(room)
    if autoload is None:
        autoload = os.environ.get(DISABLE, "") in ("", "0")
    if autoload:
        _load_installed(manager)
    return manager


def load_registries(manager: PluginManager | None = None, *, strict: bool = False) -> core.Registries:
    """Everything that the plugins of ``manager`` register (None: the built-ins and what is installed).

    A plugin that fails is named with the cause in ``failures`` and has registered nothing; with ``strict`` it raises
    :class:`PluginError`. A failing built-in always raises.
    """
    manager = make_plugin_manager() if manager is None else manager
    failures = dict(manager.failures)
    collected: dict[str, _Contribution] = {}
    for name, plugin in manager.list_name_plugin():
        if plugin is None:
            continue
        try:
            collected[name] = _collect(manager, name, plugin)
        except core.PluginError as error:
            _refuse(manager, name, error, failures)
    while True:
        # Built afresh without the plugin that failed, so that nothing half-registered can stay behind.
        registries = core.Registries()
        try:
            _fill(registries, manager, collected)
        except _Refused as refused:
            _refuse(manager, refused.plugin, refused.cause, failures)
            del collected[refused.plugin]
            continue
        break
    for name in collected:
        if name not in manager.built_in:
            registries.plugins[name] = manager.version(name)
    if manager.built_in:
        registries.plugins = {BUILT_IN: own_version(), **registries.plugins}
    registries.failures = failures
    if strict and failures:
        raise core.PluginError("; ".join(f"plugin {name!r}: {reason}" for name, reason in failures.items()))
    return registries


class _Refused(Exception):
    """What a plugin registers does not fit with the rest."""

    def __init__(self, plugin: str, cause: core.HybridTFError) -> None:
        self.plugin, self.cause = plugin, cause


def _refuse(manager: PluginManager, name: str, error: core.HybridTFError, failures: dict[str, str]) -> None:
    if name in manager.built_in:
        raise core.PluginError(f"built-in {name}: {error}") from error
    failures[name] = one_line(str(error))


# -- installed plugins -------------------------------------------------------------------------------------------------


def _load_installed(manager: PluginManager) -> None:
    owners: dict[str, str] = {}
    for dist, points in _distributions(manager):
        for point in points:
            label = f"{dist.name} {dist.version}"
            if point.name in owners or manager.has_plugin(point.name):
                taken = owners.get(point.name, "hybridtf")
                manager.failures[f"{point.name} ({label})"] = f"the plugin name {point.name!r} is taken by {taken}"
                continue
            owners[point.name] = label
            manager.versions[point.name] = dist.version
            try:
                manager.register(point.load(), point.name)
            except (Exception, SystemExit) as error:
                # The plugin boundary: any code may run when a plugin is imported, and whatever it raises must not
                # take the program down. The cause is kept and shown.
                manager.failures[point.name] = f"could not be imported from {point.value!r}: {cause(error)}"


def _distributions(manager: PluginManager) -> Iterator[tuple[metadata.Distribution, list[metadata.EntryPoint]]]:
    """Installed distributions with plugins, by name; of one installed twice, the first on the path is used."""
    found: dict[str, dict[str, metadata.Distribution]] = defaultdict(dict)
    for dist in metadata.distributions():
        # A half-removed distribution has no name; it can have no working plugin either.
        if dist.metadata["Name"] and dist.entry_points.select(group=GROUP):
            key = re.sub(r"[-_.]+", "-", dist.name).lower()
            found[key].setdefault(str(Path(str(dist.locate_file(""))).resolve()), dist)
    for _, copies in sorted(found.items()):
        (place, used), *others = copies.items()
        for other_place, other in others:
            manager.failures[f"{other.name} {other.version} ({other_place})"] = (
                f"{used.name} is installed twice; version {used.version} in {place} is used, not this one"
            )
        yield used, sorted(used.entry_points.select(group=GROUP), key=lambda point: point.name)


# -- what one plugin adds ----------------------------------------------------------------------------------------------


@dataclass
class _Contribution:
    configs: list[tuple[str, type[core.ComponentConfig]]] = field(default_factory=list)
    presets: list[tuple[str, core.Preset]] = field(default_factory=list)
    kernels: list[core.Kernel] = field(default_factory=list)
    op_cases: list[core.OpCase] = field(default_factory=list)
    recipes: list[Path] = field(default_factory=list)


def _collect(manager: PluginManager, name: str, plugin: Any) -> _Contribution:
    """Call the hooks of one plugin and check each entry by itself; raises :class:`PluginError`."""
    callers = manager.get_hookcallers(plugin) or []
    _check_hooks(plugin, [caller.name for caller in callers], built_in=name in manager.built_in)
    contribution = _Contribution()
    for caller in callers:
        for impl in caller.get_hookimpls():
            if impl.plugin is not plugin:
                continue
            if impl.hookwrapper or impl.wrapper:
                raise core.PluginError(f"{caller.name} is a wrapper; the hooks of hybridtf only collect")
            for entry in _call(caller.name, impl.function):
                _sort(caller.name.removeprefix("hybridtf_"), entry, contribution)
    return contribution


def _check_hooks(plugin: Any, implemented: Sequence[str], *, built_in: bool) -> None:
    known = hook_names()
    for name in implemented:
        if name not in known:
            raise core.PluginError(f"no hook named {name!r}. {core.known_names(name, known)}")
    for name in dir(plugin):
        if name.startswith("hybridtf_") and name not in implemented and inspect.isroutine(getattr(plugin, name)):
            raise core.PluginError(f"{name} is not marked with @hybridtf.hookimpl, so it is never called")
    if not implemented and not built_in:
        raise core.PluginError("has no hooks; mark a function such as hybridtf_mixers with @hybridtf.hookimpl")


def _call(hook: str, function: Any) -> Sequence[Any]:
    try:
        entries = function()
    except (Exception, SystemExit) as error:
        # The plugin boundary again: a hook is a plugin's code.
        raise core.PluginError(f"{hook} raised {cause(error)}") from error
    if not isinstance(entries, list | tuple):
        raise core.PluginError(f"{hook} must return a list or a tuple, not {type(entries).__name__}")
    return entries


def _sort(what: str, entry: Any, into: _Contribution) -> None:
    if what == "kernels":
        into.kernels.append(_checked_kernel(entry))
    elif what == "op_cases":
        if not isinstance(entry, core.OpCase):
            raise core.PluginError(f"op_cases: {entry!r} is not a hybridtf.core.OpCase")
        into.op_cases.append(entry)
    elif what == "recipes":
        if not isinstance(entry, Path) or not entry.is_dir():
            raise core.PluginError(f"recipes: {str(entry)!r} is not a folder given as a pathlib.Path")
        into.recipes.append(entry)
    elif isinstance(entry, core.Preset):
        into.presets.append((what, entry))
    else:
        into.configs.append((what, _checked_config(what, entry)))


def _checked_kernel(entry: Any) -> core.Kernel:
    if not isinstance(entry, core.Kernel):
        raise core.PluginError(f"kernels: {entry!r} is not a hybridtf.core.Kernel")
    if not (callable(entry.why_not) and callable(entry.load)):
        raise core.PluginError(f"kernels: why_not and load of {entry.op}/{entry.name} must be functions")
    return entry


def _checked_config(kind: str, entry: Any) -> type[core.ComponentConfig]:
    base = BASES[kind]
    if not (isinstance(entry, type) and issubclass(entry, base)):
        name = getattr(entry, "__name__", repr(entry))
        raise core.PluginError(f"{kind}: {name} is not a subclass of {base.__name__}")
    for fault in _config_faults(entry):
        raise core.PluginError(f"{kind}: {entry.__name__} {fault}")
    return entry


def _config_faults(config: type[core.ComponentConfig]) -> Iterator[str]:
    """Why a class is no proper config; the first is reported."""
    option = config.model_fields.get("type")
    names = typing.get_args(option.annotation) if option and typing.get_origin(option.annotation) is Literal else ()
    if option is None or len(names) != 1 or option.default != names[0]:
        yield "needs a field  type: Literal['name'] = 'name'"
    elif not isinstance(names[0], str) or not _NAME.fullmatch(names[0]):
        yield f"has type {names[0]!r}, which is no name: a letter, then letters, digits, _ or -"
    for method in ("load" if config.kind == "tasks" else "build", "tiny"):
        if _defined_in_core(config, method):
            yield f"has no {method}()"
    if missing := sorted(getattr(config, "__abstractmethods__", ())):
        yield f"does not define {', '.join(missing)}"
    for setting, value in core.ComponentConfig.model_config.items():
        if config.model_config.get(setting) != value:
            yield f"must keep {setting} = {value!r} in its model_config"
    for name, info in config.model_fields.items():
        given = not info.is_required() and (info.default_factory is not None or info.default is not None)
        if given and _permits_none(info.annotation):
            yield f"gives option {name!r} a default and permits None, which a recipe cannot say: TOML has no null"


def _defined_in_core(config: type, method: str) -> bool:
    owner = next(c for c in config.__mro__ if method in vars(c))
    return owner.__module__.startswith("hybridtf.core.")


def _permits_none(annotation: Any) -> bool:
    if annotation is None or annotation is type(None):
        return True
    inside = typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated)
    return inside and any(_permits_none(arg) for arg in typing.get_args(annotation))


# -- all plugins together ----------------------------------------------------------------------------------------------


def _fill(registries: core.Registries, manager: PluginManager, collected: Mapping[str, _Contribution]) -> None:
    """Register everything, presets last, so that the order of plugins does not matter; raises :class:`_Refused`."""
    recipes: dict[str, str] = {}
    for add in (_add_configs, _add_presets):
        for name, contribution in collected.items():
            origin = BUILT_IN if name in manager.built_in else name
            try:
                add(registries, contribution, origin, recipes)
            except core.HybridTFError as error:
                raise _Refused(name, error) from error


def _add_configs(
    registries: core.Registries, contribution: _Contribution, origin: str, recipes: dict[str, str]
) -> None:
    for kind, config in contribution.configs:
        registries[kind].add(config, origin)
    for kernel in contribution.kernels:
        registries.kernels.add(kernel)
        registries.kernel_origins[kernel.op, kernel.name] = origin
    for case in contribution.op_cases:
        registries.op_cases.setdefault(case.op, []).append(case)
    for folder in contribution.recipes:
        for file in sorted(folder.rglob("*.toml")):
            recipe = file.relative_to(folder).with_suffix("").as_posix()
            if recipe in recipes:
                raise core.PluginError(f"recipes: the name {recipe!r} is already registered by {recipes[recipe]}")
            recipes[recipe] = origin
        registries.recipe_folders.append(folder)


def _add_presets(
    registries: core.Registries, contribution: _Contribution, origin: str, recipes: dict[str, str]
) -> None:
    for kind, preset in contribution.presets:
        registries[kind].add(preset, origin)
