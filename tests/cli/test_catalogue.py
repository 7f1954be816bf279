"""``list``, ``plugins``, ``schema`` and ``doctor``."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from hybridtf.cli.doctor import EXTRAS
from hybridtf.core import DTYPES, KINDS, PHASES, active
from hybridtf.recipe import recipe_names
from tests.cli.helpers import ROOT, as_json, ok, refused, run


def test_types_of_options_are_in_words() -> None:
    words = {name: about["type"] for name, about in as_json("list", "mixers")["mixers"]["attention"]["options"].items()}
    assert (words["n_heads"], words["window"], words["qk_norm"]) == ("int", "int | none", "NormConfig | none")
    options = as_json("list", "positions")["positions"]["rope"]["options"]
    assert options["scaling"]["type"] == "dynamic_ntk | linear | llama3 | longrope | ntk | proportional | yarn | none"
    everything = run("list", "-v").stdout
    assert [sign for sign in ("0x", "typing", "FieldInfo", "hybridtf.core") if sign in everything] == []


def test_the_list_is_one_object_of_all_that_is_registered() -> None:
    found = as_json("list")
    assert list(found) == [*KINDS, "kernels", "recipes", "failures"]
    for kind in KINDS:
        assert list(found[kind]) == active()[kind].names()
    assert list(found["recipes"]) == list(recipe_names())
    kernels = active().kernels
    assert list(found["kernels"]) == [f"{op}/{kernel.name}" for op in kernels.ops() for kernel in kernels.of(op)]


def test_presets_say_what_they_stand_for() -> None:
    mqa = as_json("list", "mixers")["mixers"]["mqa"]
    assert (mqa["preset_of"], mqa["fixed"], mqa["plugin"]) == ("attention", {"n_kv_heads": 1}, "hybridtf")
    assert "attention with n_kv_heads = 1" in ok("list", "mixers").stdout
    assert as_json("list", "mixers")["mixers"]["gqa"]["requires"] == ["n_kv_heads"]


def test_a_combinator_says_nothing_of_what_its_example_holds() -> None:
    mixers, printed = as_json("list", "mixers")["mixers"], ok("list", "mixers").stdout.splitlines()
    combinators = {name for name, about in mixers.items() if about["combinator"]}
    assert combinators == {"bidirectional", "lora", "meta_tokens", "multi_scale", "parallel"}
    for name, about in mixers.items():
        line = next(line for line in printed if line.split()[:1] == [name])
        if name in combinators:
            assert (about["ops"], about["time_exponent"]) == (None, None)
            assert about["state"] == ("none" if name == "bidirectional" else None)
            assert line.count("of what it holds") == (1 if name == "bidirectional" else 2)
        else:
            assert about["ops"]
            assert about["time_exponent"] >= 1
            assert about["state"]
            assert "of what it holds" not in line


def test_what_a_component_cannot_do_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtf.mixers.mamba2 import Mamba2

    monkeypatch.setattr(Mamba2, "cannot", {"crop": "the past is gone"})
    found = as_json("list")
    assert found["mixers"]["mamba2"]["cannot"] == {"crop": "the past is gone"}
    assert found["mixers"]["attention"]["cannot"] == {}
    assert "crop: the past is gone" in ok("list", "mixers").stdout


def test_verbose_shows_options() -> None:
    plain, verbose = ok("list", "mixers").stdout, ok("list", "mixers", "-v").stdout
    assert "chunk_size" in verbose
    assert "chunk_size" not in plain


def test_an_unknown_kind() -> None:
    assert refused("list", "mixer").startswith("no kind named 'mixer'. Did you mean 'mixers'? Known: ")


def test_nothing_is_wrapped_where_there_is_no_terminal() -> None:
    lines = ok("list", "recipes", "-v").stdout.splitlines()
    for name, path in recipe_names().items():
        assert any(name in line and str(path) in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_plugins() -> None:
    found = as_json("plugins")["plugins"]
    assert set(found) == set(active().plugins)
    assert found["hybridtf"]["adds"]["models"] == ["language_model"]
    assert "ssd/chunked" in found["hybridtf"]["adds"]["kernels"]
    assert "language_model" in ok("plugins").stdout


def test_the_schema_covers_all_sections(tmp_path: Path) -> None:
    schema = json.loads(ok("schema").stdout)
    assert "lr" in schema["properties"]["train"]["properties"]
    assert "mixers.mamba2" in schema["$defs"]
    result = ok("schema", "-o", tmp_path / "schema.json")
    assert result.stdout == ""
    assert json.loads((tmp_path / "schema.json").read_text()) == schema


def test_doctor_answers_for_every_kernel_phase_and_dtype() -> None:
    found = as_json("doctor")
    assert found["versions"]["torch"] == metadata.version("torch")
    kernels = active().kernels
    assert {(k["op"], k["kernel"]) for k in found["kernels"]} == {(op, k.name) for op in kernels.ops() for k in kernels.of(op)}
    for kernel in found["kernels"]:
        assert list(kernel["cells"]) == list(PHASES)
        for row in kernel["cells"].values():
            assert list(row) == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    text = ok("doctor").stdout
    for word in ("versions", "devices", "plugins", "extras", "kernels", "everywhere"):
        assert word in text


def test_doctor_gives_the_reason_of_a_kernel_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtf.cli.doctor import _print_kernels

    row = {"float32": None, "bfloat16": "needs a GPU"}
    cells = {"train": {"float32": "no backward", "bfloat16": "no backward"}, "prefill": row, "decode": row}
    printed: list[str] = []
    monkeypatch.setattr("hybridtf.cli.doctor.add_row", lambda table, *cells: printed.append(" | ".join(map(str, cells))))
    _print_kernels([{"op": "ssd", "kernel": "fast", "device": "cpu", "priority": 20, "cells": cells}])
    assert printed == [
        "ssd | fast | cpu | 20 | runs | prefill, decode: float32",
        " |  |  |  | no backward | train: all dtypes",
        " |  |  |  | needs a GPU | prefill, decode: bfloat16",
    ]


def test_the_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: tuple(word.partition(">=")[0] for word in declared[extra]) for extra in declared}
    assert {extra: names[extra] for extra in names if extra not in ("test", "dev")} == EXTRAS
