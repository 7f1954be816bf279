"""What the benchmark calls a success, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("surgery_program", Path(__file__).parents[2] / "benchmarks" / "surgery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_that_are_none_are_no_success(program):
    assert program.good(20.0, {"gqa": (90.0, 40.0)}, (20.0, 20.001))
    assert not program.good(20.0, {"gqa": (90.0, math.nan)}, None)
    assert not program.good(20.0, {"gqa": (math.nan, 40.0)}, None)
    assert not program.good(math.nan, {}, None)
    assert not program.good(20.0, {"gqa": (90.0, 90.0)}, None)
    assert not program.good(20.0, {}, (20.0, math.nan))


def test_a_table_or_a_name(program):
    assert program.table_of("mamba2") == {"type": "mamba2"}
    assert program.table_of('{ type = "gla", d_conv = 4 }') == {"type": "gla", "d_conv": 4}


@pytest.mark.parametrize("name", ["teacher", "tokenizer.json"])
def test_what_lies_in_the_folder_is_not_replaced(program, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit, match="choose another --work"):
        program.take_in(tmp_path / "weights.gguf", tmp_path)
    assert (tmp_path / name).read_text() == "mine"
