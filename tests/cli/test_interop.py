"""``import`` and ``export`` from the command line."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.models.weights import read_weights
from tests.cli.helpers import as_json, ok, refused
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


def _ours(tmp_path):
    ok("import", oracle("llama").folder, "-o", tmp_path / "ours")
    return tmp_path / "ours"
