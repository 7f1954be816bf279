"""Tiny recipes over a tiny corpus, and the two ways to run the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from hybridtf.cli import app

ROOT = Path(__file__).parents[2]

MAMBA = """
[model.blocks.m]
mixer = { type = "mamba2", d_state = 8, head_dim = 8, chunk_size = 16 }
"""

RECIPE = """
[meta]
title = "Tiny"

[model]
type = "language_model"
vocab_size = 257
d_model = 16
n_layers = 4
pattern = "(m a)*"
max_seq_len = 32

MAMBA
[model.blocks.a]
mixer = { type = "gqa", n_heads = 4, n_kv_heads = 2 }
channel_mixer = { type = "swiglu", d_ff = 16 }

[task]
type = "text"
source = "CORPUS"
held_out = 0.4

TRAIN"""

TRAIN = """[train]
steps = 4
batch_size = 2
seq_len = 32
log_every = 2
eval_tokens = 0
"""


def corpus(folder: Path) -> Path:
    """Ten texts, long enough to be read at four times the trained length."""
    place = folder / "texts"
    place.mkdir(exist_ok=True)
    for i in range(10):
        (place / f"{i}.txt").write_text(f"the state of the union in year {i} is " + "the people and " * (12 + i))
    return place


def write_recipe(folder: Path, name: str = "tiny", *changes: tuple[str, str]) -> str:
    """A recipe's file, with pieces of its text replaced; every piece must be there."""
    text = RECIPE.replace("CORPUS", str(corpus(folder))).replace("MAMBA", MAMBA).replace("TRAIN", TRAIN)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """The program inside this process. An exception that it lets through is raised here: it would be a traceback."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def ok(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """:func:`run` that must end with 0."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def as_json(*arguments: object) -> Any:
    """What the program prints with --json: JSON and nothing else."""
    return json.loads(ok(*arguments, "--json").stdout)


def refused(*arguments: object) -> str:
    """The one message on stderr of wrong input: exit code 2, nothing on stdout, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("hybridtf: error: ")]
    assert len(errors) == 1, result.stderr
    return errors[0].removeprefix("hybridtf: error: ")


def environment(**changes: str) -> dict[str, str]:
    """Of a process of its own: this checkout, one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "hybridtf", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=120, **options)
