"""What is said of an exception that is no user's mistake: where it was raised, whose code that is, and the traceback.

Read off the frames that the exception passed, once it has ended the command: no model pays for it while it computes.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtf.core.origins import Origin

TRACEBACK = "HYBRIDTF_TRACEBACK"
"""The environment variable that asks for every frame of a traceback, by the word ``full``."""

OURS = "this is a bug in hybridtf or a plugin, not a mistake of yours; please report it with the lines above"


@dataclass(frozen=True)
class Fault:
    """Whose code an exception was raised in."""

    plugin: str
    package: str
    """Top-level package of that code."""
    origin: Origin | None
    """The component, where it was one that a registry knows and a module of its."""


def explain(error: BaseException) -> tuple[str, str]:
    """The traceback and the line after it. Of a plugin's code, the traceback has the plugin's frames and the raise alone."""
    fault = _fault(error)
    trace = traceback.TracebackException.from_exception(error)
    if fault is None:
        return "".join(trace.format()), OURS
    from hybridtf.core.origins import cause

    short = os.environ.get(TRACEBACK, "") != "full"
    if short:
        _cut(trace, error, fault.package)
    what = f"plugin {fault.plugin!r}" if fault.origin is None else str(fault.origin)
    more = f"; {TRACEBACK}=full shows the frames that were left out" if short else ""
    line = f"error: in {what}: {cause(error, fault.package)}. This is a bug in the plugin, not a mistake of yours{more}"
    return "".join(trace.format()), line


def _fault(error: BaseException) -> Fault | None:
    """The innermost component of a plugin whose code an exception passed, else the innermost plugin; None: no plugin's."""
    registries = sys.modules.get("hybridtf.core.registry")
    found = None if registries is None else registries.loaded()
    if found is None:
        return None
    packages = _packages(found)
    fault, layer = None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names: Mapping[str, Any] = frame.f_locals
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        layer = _layer(names, layer)
        origin = _origin(names.get("self"), layer)
        if origin is not None and origin.plugin is not None:
            fault = Fault(origin.plugin, _package(origin), origin)
        elif package in packages and (fault is None or fault.package != package):
            fault = Fault(packages[package], package, None)
    return fault


def _packages(registries: Any) -> dict[str, str]:
    """The plugin of each top-level package that an installed component comes from."""
    from hybridtf.core.origins import package_of
    from hybridtf.core.registry import BUILT_IN

    return {
        package_of(config): registry.origin(name)
        for registry in registries.by_kind.values() for name, config in registry.configs().items()
        if registry.origin(name) != BUILT_IN
    }


def _package(origin: Origin) -> str:
    from hybridtf.core.origins import package_of

    return package_of(type(origin.config))


def _layer(names: Mapping[str, Any], before: int | None) -> int | None:
    """The layer that a frame is about to run, where it is a stack's: a shared block does not know which visit it is."""
    from hybridtf.models.compose import Stack

    return names["i"] if isinstance(names.get("self"), Stack) and isinstance(names.get("i"), int) else before


def _origin(module: object, layer: int | None) -> Origin | None:
    from torch import nn

    from hybridtf.core.origins import origin_of

    origin = origin_of(module) if isinstance(module, nn.Module) else None
    return origin if origin is None or layer is None else replace(origin, layer=layer)


def _cut(trace: traceback.TracebackException, error: BaseException, package: str) -> None:
    """Keep the frames of ``package`` and the one that raised, of this exception and of those behind it."""
    own = {f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__) if _is_of(f, package)}
    trace.stack = traceback.StackSummary.from_list(
        [frame for i, frame in enumerate(trace.stack) if frame.filename in own or i == len(trace.stack) - 1]
    )
    for inner, cause in ((trace.__cause__, error.__cause__), (trace.__context__, error.__context__)):
        if inner is not None and cause is not None:
            _cut(inner, cause, package)


def _is_of(frame: Any, package: str) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == package
