"""What the report needs beside the library: loaded when asked for, and missing with a way to mend it."""

from __future__ import annotations

import importlib
from types import ModuleType

from hybridtf.core import HybridTFError

_DISTRIBUTIONS = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "jinja2", "markupsafe": "jinja2"}


def need(module: str) -> ModuleType:
    """Import an optional package; raises :class:`HybridTFError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise HybridTFError(f"the report needs {_DISTRIBUTIONS[module]}: pip install 'hybridtf[report]'") from None
