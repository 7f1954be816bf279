"""Other people's references, run as they are: ``make .peers/.installed`` fetches them from the package registry.

They lie in a folder that no import path leads to, and one module at a time is taken from there: transformers, for one, changes
what it runs as soon as it can import fla or xlstm. A package that was taken does not stay in ``sys.modules`` either.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / ".peers"
_TAKEN: dict[str, ModuleType] = {}


def peer(path: str, **stand_ins: Mapping[str, Any]) -> ModuleType:
    """The module of a file below the folder (``fla/ops/gla/naive.py``), alone; or a package or one of its modules by its dotted
    name (``mambapy``, ``s5.s5_model``), which may import what else is in that package.

    ``stand_ins`` are modules that it imports and that are not here, as names of what they would hold; ``__`` in a name is a
    dot. Names that no one gave are ``None``: whoever runs into one of them needs the real thing.
    """
    if path in _TAKEN:
        return _TAKEN[path]
    is_file = path.endswith(".py")
    file = FOLDER / (path if is_file else path.partition(".")[0])
    if not file.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: make .peers/.installed")
        pytest.skip(f"{path} is missing: make .peers/.installed")
    with _standing_in({name.replace("__", "."): names for name, names in stand_ins.items()}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _TAKEN[path] = _file(path) if is_file else _package(path)
    return _TAKEN[path]


def _file(path: str) -> ModuleType:
    name = "peer_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.jit look there
    try:
        spec.loader.exec_module(module)
    except ImportError:
        del sys.modules[name]  # half a module would hide the reason from the next who asks
        raise
    return module


def _package(name: str) -> ModuleType:
    top = name.partition(".")[0]
    finder = _Only(top)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for other in [other for other in sys.modules if other.partition(".")[0] == top]:
            del sys.modules[other]


class _Only(MetaPathFinder):
    """Finds one package in the folder, and nothing else there."""

    def __init__(self, top: str) -> None:
        self.top = top

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.top:
            return None
        return PathFinder.find_spec(fullname, [str(FOLDER)] if path is None else path, target)


class _StandIn(ModuleType):
    """A module of which only the given names are there; it counts as a package, so that parts of it can be imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _standing_in(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    here: dict[str, ModuleType] = {}
    for name, names in modules.items():
        for i in range(name.count(".") + 1):
            above = ".".join(name.split(".")[: i + 1])
            here.setdefault(above, _StandIn(above))
        vars(here[name]).update(names)
    for name, module in here.items():
        above, _, last = name.rpartition(".")
        if above:
            setattr(here[above], last, module)
    hidden = {name: sys.modules.get(name) for name in here}
    sys.modules.update(here)
    try:
        yield
    finally:
        for name, before in hidden.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
