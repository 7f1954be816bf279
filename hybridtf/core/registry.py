"""Registries: which component has which name. Filled once from hooks, then read only.

A registry holds config classes and presets of one kind. Everything that turns a name into a component asks
:func:`active`, which loads the installed plugins on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtf.core.errors import ConfigError, PluginError, RecipeError, UnknownNameError, known_names, listed
from hybridtf.core.kernels import Kernel, KernelSet
from hybridtf.core.op_cases import OpCase

if TYPE_CHECKING:
    from hybridtf.core.config import ComponentConfig

KINDS: tuple[str, ...] = (
    "mixers", "channel_mixers", "blocks", "norms", "positions", "stems", "heads", "models", "tasks",
)
"""The kinds of component, each with a registry of its own and a hook ``hybridtf_<kind>``."""


BUILT_IN = "hybridtf"
"""Under this plugin name the components of hybridtf itself are registered."""


@dataclass(frozen=True)
class Preset:
    """A second name for a component with some options fixed (``mqa`` is ``attention`` with one kv head).

    ``options`` may not be given otherwise by a recipe; ``requires`` names options that must be given. A preset is
    written back as its base type.
    """

    name: str
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()

    def faults(self, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Options that a recipe may not give otherwise, and options that it must give, as (path, message)."""
        fixed = [
            (key, f"is fixed to {value!r} by {self.name!r}; use type = {self.type!r} to set it to {given[key]!r}")
            for key, value in self.options.items() if given.get(key, value) != value
        ]
        return fixed + [(key, f"is required by {self.name!r}") for key in self.requires if given.get(key) is None]


class Registry:
    """Names of one kind of component."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._configs: dict[str, type[ComponentConfig]] = {}
        self._presets: dict[str, Preset] = {}
        self._origin: dict[str, str] = {}

    def add(self, entry: type[ComponentConfig] | Preset, origin: str) -> None:
        """Register a config class or a preset of plugin ``origin``; a taken name is refused."""
        name = entry.name if isinstance(entry, Preset) else entry.type_name()
        if name in self._origin:
            raise PluginError(f"{self.kind}: the name {name!r} is already registered by {self._origin[name]}")
        if isinstance(entry, Preset):
            if entry.type not in self._configs:
                raise PluginError(f"{self.kind}: preset {name!r} stands for {entry.type!r}, which is not registered")
            unknown = sorted({*entry.options, *entry.requires} - set(self._configs[entry.type].model_fields))
            if unknown:
                raise PluginError(
                    f"{self.kind}: preset {name!r} names {unknown[0]!r}, which is no option of {entry.type!r}"
                )
            self._presets[name] = entry
        else:
            self._configs[name] = entry
        self._origin[name] = origin

    def __contains__(self, name: str) -> bool:
        return name in self._origin

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._origin))

    def names(self) -> list[str]:
        """All names, presets included, sorted."""
        return sorted(self._origin)

    def configs(self) -> dict[str, type[ComponentConfig]]:
        """Config classes by name, presets left out."""
        return dict(sorted(self._configs.items()))

    def presets(self) -> dict[str, Preset]:
        return dict(sorted(self._presets.items()))

    def origin(self, name: str) -> str:
        """The plugin that registered the name."""
        self._check(name)
        return self._origin[name]

    def get(self, name: str) -> type[ComponentConfig]:
        """The config class of a name (of its base, for a preset)."""
        self._check(name)
        return self._configs[self._presets[name].type if name in self._presets else name]

    def make(self, options: Mapping[str, Any]) -> ComponentConfig:
        """The config that a table of options (with its ``type``) describes."""
        name = options.get("type")
        if not isinstance(name, str):
            names = listed(self._origin, f"hybridtf list {self.kind}") if self._origin else "(nothing is registered)"
            raise ConfigError(f"needs type = one of {names}")
        self._check(name)
        faults: list[tuple[str, str]] = []
        if name in self._presets:
            preset = self._presets[name]
            faults = preset.faults(options)
            options = {**options, **preset.options, "type": preset.type}
        try:
            config = self.get(name)(**options)
        except RecipeError as error:
            said = {path for path, _ in faults}
            raise RecipeError("", faults + [fault for fault in error.faults if fault[0] not in said]) from None
        if faults:
            raise RecipeError("", faults)
        return config

    def _check(self, name: str) -> None:
        if name not in self._origin:
            found = loaded()
            elsewhere = [] if found is None else [kind for kind, other in found.by_kind.items() if name in other]
            what = f", which is a {' and a '.join(map(singular, elsewhere))}" if elsewhere else ""
            names = known_names(name, self._origin, f"hybridtf list {self.kind}")
            raise UnknownNameError(f"no {singular(self.kind)} named {name!r}{what}. {names}")


def singular(kind: str) -> str:
    """``channel_mixers`` -> ``channel mixer``, for messages."""
    return kind.removesuffix("s").replace("_", " ")


@dataclass
class Registries:
    """Everything that is registered: one :class:`Registry` a kind, the kernels, recipe folders, and what went wrong."""

    by_kind: dict[str, Registry] = field(default_factory=lambda: {kind: Registry(kind) for kind in KINDS})
    kernels: KernelSet = field(default_factory=KernelSet)
    kernel_origins: dict[tuple[str, str], str] = field(default_factory=dict)
    """The plugin that registered each kernel, by op and name."""
    op_cases: dict[str, list[OpCase]] = field(default_factory=dict)
    """Ways to try an op, by op."""
    recipe_folders: list[Path] = field(default_factory=list)
    plugins: dict[str, str] = field(default_factory=dict)
    """Loaded plugins: name -> version."""
    failures: dict[str, str] = field(default_factory=dict)
    """Plugins that could not be loaded: name -> reason."""

    def kernels_of(self, plugin: str) -> list[Kernel]:
        """The kernels that a plugin registered."""
        return [self.kernels.get(op, name) for (op, name), origin in self.kernel_origins.items() if origin == plugin]

    def __getitem__(self, kind: str) -> Registry:
        if kind not in self.by_kind:
            raise UnknownNameError(f"no registry named {kind!r}. {known_names(kind, self.by_kind)}")
        return self.by_kind[kind]


def own_version() -> str:
    """The version of hybridtf."""
    # By string: the package's own module stands above all rooms.
    return str(importlib.import_module("hybridtf").__version__)


_active: ContextVar[Registries | None] = ContextVar("hybridtf_registries", default=None)
_default: Registries | None = None
_loading = False


def active() -> Registries:
    """The registries in force: those of :func:`using`, else the installed plugins', loaded on first use."""
    global _default, _loading
    chosen = _active.get()
    if chosen is not None:
        return chosen
    if _default is None:
        if _loading:
            raise PluginError(
                "a component was looked up while plugins are still being loaded; make configs inside functions, "
                "not when a module is imported"
            )
        _loading = True
        try:
            # Named by string, as the built-ins are: core stands below the plugin manager and does not import it.
            _default = importlib.import_module("hybridtf.plugins").load_registries()
        finally:
            _loading = False
    return _default


def loaded() -> Registries | None:
    """The registries in force, where something has asked for them already: nothing is loaded."""
    return _active.get() or _default


@contextmanager
def using(registries: Registries) -> Iterator[Registries]:
    """Inside, :func:`active` answers ``registries`` (tests, embedding applications)."""
    token = _active.set(registries)
    try:
        yield registries
    finally:
        _active.reset(token)
