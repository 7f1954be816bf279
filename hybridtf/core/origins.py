"""Whose code a module is: the component that built it is remembered, so that a fault can name it, its plugin and its layer.

Nothing of it is looked at while a model computes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hybridtf.core.errors import one_line
from hybridtf.core.registry import BUILT_IN, active

if TYPE_CHECKING:
    from hybridtf.core.config import ComponentConfig

_KEY = "_hybridtf_origin"


@dataclass(frozen=True)
class Origin:
    """The component that a module was built by, where it stands in its recipe, and in which layer."""

    config: ComponentConfig
    where: str = ""
    layer: int = 0

    @property
    def plugin(self) -> str | None:
        """The installed plugin that brought it; None for built-ins."""
        return plugin_of(self.config)

    def __str__(self) -> str:
        """``model.blocks.c.mixer: 'boom' of plugin 'hybridtf-boom' (layer 2)``; a built-in's name alone after the place."""
        place = f"{self.where}: " if self.where else ""
        whose = "" if self.plugin is None else f" of plugin {self.plugin!r}"
        # Stems and heads are no layers; a component that is built by itself has no place, and the number that it was told.
        return f"{place}{self.config.type_name()!r}{whose}{self.in_layer() if whose else ''}"

    def in_layer(self) -> str:
        """`` (layer 2)``; nothing for what stands outside of the layers."""
        return "" if self.where and "blocks." not in self.where else f" (layer {self.layer})"


def plugin_of(config: ComponentConfig) -> str | None:
    """The installed plugin that registered the config's class; None for built-ins and unregistered classes."""
    registry, name = active()[config.kind], config.type_name()
    if registry.configs().get(name) is not type(config) or registry.origin(name) == BUILT_IN:
        return None
    return registry.origin(name)


def remember(module: nn.Module, origin: Origin) -> None:
    """The first to build a module is the one whose code it is: another that hands it on changes nothing."""
    vars(module).setdefault(_KEY, origin)


def origin_of(module: nn.Module) -> Origin | None:
    """What a module was built by; None for parts of a component, which no registry knows."""
    found: Origin | None = vars(module).get(_KEY)
    return found


def owner_of(model: nn.Module, name: str) -> tuple[Origin | None, str]:
    """The innermost component around a parameter's canonical name, and the rest of the name inside of it."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        try:
            origin = origin_of(model.get_submodule(".".join(parts[:depth])))
        except AttributeError:  # a name that was made up
            continue
        if origin is not None:
            return origin, ".".join(parts[depth:])
    return None, name


def package_of(thing: type) -> str:
    """The top-level package that a class comes from."""
    return thing.__module__.partition(".")[0]


def frames_of(error: BaseException) -> Iterator[tuple[str, str, int]]:
    """(package, file, line) of the frames that an error passed, the raise last; those of the import system are none."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith("<frozen "):
            yield str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code.co_filename, line


def cause(error: BaseException, package: str | None = None) -> str:
    """``KeyError: 'gone' (boom.py, line 51)``: an error on one line, with the innermost place in ``package``.

    None: with the innermost that is neither in hybridtf nor in Python's import system.
    """
    said = one_line(f"{type(error).__name__}: {error}")
    for where, file, line in reversed(list(frames_of(error))):
        if where == package or (package is None and where not in (BUILT_IN, "importlib")):
            return f"{said} ({Path(file).name}, line {line})"
    return said
