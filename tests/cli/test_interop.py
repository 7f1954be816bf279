"""``import`` and ``export`` from the command line."""

from __future__ import annotations

import json
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.models.weights import read_weights
from tests.cli.helpers import as_json, ok, refused, run
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")


def test_in_and_out(tmp_path):
    one = oracle("llama")
    found = as_json("import", one.folder, "-o", tmp_path / "ours")
    assert (found["family"], found["dtype"], found["pattern"], found["notes"]) == ("llama", "float32", "a*3", [])
    assert found["parameters"] == sum(x.numel() for x in read_weights(one.folder / "model.safetensors").values())
    assert "llama (LlamaForCausalLM), written:" in ok("export", tmp_path / "ours", "-o", tmp_path / "back").stdout
    before, after = (read_weights(folder / "model.safetensors") for folder in (one.folder, tmp_path / "back"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "float64, pattern a*3" in ok("import", one.folder, "-o", tmp_path / "wide", "--dtype", "float64").stdout


def test_wrong_input_is_one_line(tmp_path):
    assert "config.json: no such file" in refused("import", tmp_path, "-o", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert "no family is called 'lama'" in refused("export", _ours(tmp_path), "-o", tmp_path / "out", "--family", "lama")
    assert "--to" in refused("export", tmp_path / "ours", "-o", tmp_path / "out", "--to", "gguf")
    assert not (tmp_path / "out").exists()


def test_parity_beside_transformers(tmp_path):
    good = oracle("llama").folder
    (row,) = [json.loads(line) for line in ok("parity", good, "--json").stdout.splitlines()]
    assert (row["pass"], row["family"], row["pattern"], row["why"]) == (True, "llama", "a*3", None)
    assert all(0 <= row[name] < 1e-9 for name in ("float64", "decode", "packed", "padded"))
    assert 1e-9 < row["float32"] < 1e-4 * row["scale"]
    found = run("parity", good, tmp_path)
    assert found.exit_code == 1
    assert "not read: no such file" in found.stdout
    assert "1 of 2 pass" in found.stdout
    assert "name folders, or give --all" in refused("parity")


def test_without_lm_eval_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'hybridtf[eval]'" in refused("lm-eval", "--model", "hybridtf", "--tasks", "x")


def _ours(tmp_path):
    ok("import", oracle("llama").folder, "-o", tmp_path / "ours")
    return tmp_path / "ours"
