"""``import`` and ``export`` from the command line."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.models.weights import read_weights, write_tensors
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


def _settings(folder, **change):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def _tensors(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _shards(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    write_tensors(tensors, file, max_shard_bytes=40_000)
    return sorted(folder.glob("model-*.safetensors"))


def _cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _wrong_index(folder):
    _shards(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))


BAD = {
    "a shard is missing": (lambda folder: _shards(folder)[1].unlink(), "no such weights file, which"),
    "a file is cut": (_cut, "not a readable safetensors file"),
    "an index names more": (_wrong_index, "model.extra.weight is not in"),
    "whole numbers": (
        lambda folder: _tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)})),
        "lm_head.weight is torch.int8: quantised tensors are not read",
    ),
    "a dtype that torch lacks here": (
        lambda folder: _tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.complex64)})),
        "lm_head.weight is C64, which is not read",
    ),
    "a setting more": (lambda folder: _settings(folder, logit_scale=0.5), "logit_scale is not known of this family"),
    "a tensor more": (
        lambda folder: _tensors(folder, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        "model.extra.weight is in the files and in no layer",
    ),
    "an unknown architecture": (lambda folder: _settings(folder, model_type="lama"), "no family reads model_type 'lama'"),
    "other sizes": (lambda folder: _settings(folder, intermediate_size=40), "the settings ask for (40, 32)"),
    "more layers": (lambda folder: _settings(folder, num_hidden_layers=4), "are missing; the settings ask for them"),
    "fewer layers": (lambda folder: _settings(folder, num_hidden_layers=2), "in the files and in no layer"),
    "another method": (
        lambda folder: _settings(folder, quantization_config={"quant_method": "awq"}), "quantised (awq); read are fp8, mxfp4",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_one_line_and_nothing_is_written(tmp_path, case):
    spoil, why = BAD[case]
    folder = shutil.copytree(oracle("llama").folder, tmp_path / "theirs")
    spoil(folder)
    assert why in refused("import", folder, "-o", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


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
