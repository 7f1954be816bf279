"""lm-eval's own program with our model in its registry."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybridtf.core import ConfigError

NAME = "hybridtf"
TARGET = "hybridtf.interop.lm_eval.model:HybridTFLM"


def register() -> None:
    """Put the class into lm-eval's registry, by name: it is imported when it is asked for."""
    try:
        from lm_eval import models  # its own first: a registry that holds something is not filled any more
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(f"lm-eval cannot be imported ({error}). Run  pip install 'hybridtf[eval]'") from None
    assert models
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def run(arguments: Sequence[str]) -> None:
    """What ``lm_eval ARGUMENTS`` does."""
    register()
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
