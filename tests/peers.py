"""Other people's references, run as they are: ``make .peers/.installed`` fetches them from the package registry.

They lie in a folder that no import path leads to, and one module at a time is taken from there: transformers, for one, changes
what it runs as soon as it can import fla.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / ".peers"


def peer(path: str) -> ModuleType:
    """The module of a file below the folder (``fla/ops/gla/naive.py``), or a whole package by its name (``mambapy``)."""
    file = FOLDER / path
    if not file.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: make .peers/.installed")
        pytest.skip(f"{path} is missing: make .peers/.installed")
    if file.is_dir():
        name, search, file = path, [str(file)], file / "__init__.py"
    else:
        name, search = "peer_" + path.removesuffix(".py").replace("/", "_"), None
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError:
        del sys.modules[name]  # half a module would hide the reason from the next who asks
        raise
    return module
