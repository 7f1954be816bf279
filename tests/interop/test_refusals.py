"""What is wrong with a checkpoint is said in one line, and nothing is written."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.core import CheckpointError, ConfigError, HybridTFError
from hybridtf.interop import export_checkpoint, import_checkpoint
from hybridtf.models import LanguageModelConfig
from hybridtf.models.weights import write_tensors
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path):
    """A Llama in the published naming."""
    return shutil.copytree(oracle("llama").folder, tmp_path / "llama")


def change(folder, **settings):
    file = folder / "config.json"
    table = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in table.items() if value is not Ellipsis}))


def retensor(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match):
        import_checkpoint(folder)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model_type": "lama"}, "no family reads model_type 'lama'. Did you mean 'llama'"),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', which is no whole number"),
        ({"hidden_size": 0}, "hidden_size is 0, and must be at least 1"),
        ({"mlp_bias": 1}, "mlp_bias is 1, which is no true or false"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; known here: 'silu'"),
        ({"logit_scale": 0.5}, "logit_scale is not known of this family and may change the model"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not known"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "rope_parameters: twist is not known"),
        ({"quantization_config": {"quant_method": "awq"}}, r"the weights are quantised \(awq\)"),
        ({"num_attention_heads": 5}, "the settings are of no model that can be built"),
        ({"num_hidden_layers": 4}, r"model.layers.3.input_layernorm.weight, .* are missing; the settings ask for them"),
        ({"num_hidden_layers": 2}, r"model.layers.2.* in the files and in no layer"),
        ({"intermediate_size": 40}, r"gate_proj.weight \(44, 32\); the settings ask for \(40, 32\)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_settings(folder, settings, match):
    change(folder, **settings)
    refused(folder, match)


def test_files_that_are_missing_or_broken(folder, tmp_path):
    refused(tmp_path, "config.json: no such file")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(folder, "not a readable safetensors file")
    file.unlink()
    refused(folder, "no such weights file")
    (folder / "config.json").write_text("[1, 2")
    refused(folder, "not readable as JSON")


def test_a_shard_that_is_missing(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    write_tensors(tensors, file, max_shard_bytes=40_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert import_checkpoint(folder).notes == ()
    shards[1].unlink()
    refused(folder, f"{shards[1].name}: no such weights file, which model.safetensors.index.json names")


def test_tensors_that_are_too_many_too_few_or_quantised(folder):
    retensor(folder, lambda t: t.update({"model.layers.0.self_attn.extra": torch.ones(2)}))
    refused(folder, "model.layers.0.self_attn.extra is in the files and in no layer that the settings ask for")
    retensor(folder, lambda t: t.pop("model.layers.0.self_attn.extra"))
    retensor(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    refused(folder, "lm_head.weight is torch.int8: quantised tensors are not read")
    retensor(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lm_head.weight is missing; the settings ask for it")


def test_frequencies_of_older_files_are_left_unread(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    retensor(folder, lambda t: t.update({name: torch.ones(4)}))
    assert import_checkpoint(folder).notes == ()


def test_dtypes_are_kept_and_mixed_ones_widened_and_told(folder):
    def half(tensors):
        tensors.update({name: x.bfloat16() for name, x in tensors.items()})

    retensor(folder, half)
    found = import_checkpoint(folder)
    assert (found.dtype, found.notes) == (torch.bfloat16, ())
    retensor(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    found = import_checkpoint(folder)
    assert found.dtype == torch.float32
    assert "1 tensors in float32: kept as float32" in found.notes[0]
    retensor(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}))
    assert import_checkpoint(folder).dtype == torch.float32  # neither of two halves holds the other
    assert import_checkpoint(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_no_family_has_is_not_written(folder, tmp_path):
    model = import_checkpoint(folder).model
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="no family is called 'lama'"):
        export_checkpoint(model, out, family="lama")
    with pytest.raises(CheckpointError, match=r"mamba2 cannot say this model \(a\*3\): its layers are of other kinds"):
        export_checkpoint(model, out, family="mamba2")
    table = model.config.to_dict()
    table["blocks"]["a"]["mixer"]["sinks"] = True
    odd = LanguageModelConfig(**table).build()
    said = r"no published family has this model: llama comes nearest and cannot say layer 0 \(block a\): mixer.sinks = True"
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(odd, out)
    assert not out.exists()
    with pytest.raises(CheckpointError, match="is there already and not empty"):
        export_checkpoint(model, folder)


def test_gguf_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(HybridTFError, match=r"reading GGUF needs gguf and transformers: pip install 'hybridtf\[gguf\]'"):
        import_checkpoint(tmp_path / "model.gguf")


EDITS = {
    "a mamba layer": (lambda block: block | {"mixer": {"type": "mamba"}}, "mixer.type = 'mamba' (it has 'attention')"),
    "another norm": (lambda block: block | {"norm": {"type": "layer_norm"}}, "norm.type = 'layer_norm' (it has 'rms_norm')"),
    "a window": (lambda block: block | {"mixer": block["mixer"] | {"window": 4}}, "mixer.window = 4 (it has None)"),
}


def with_an_odd_layer(folder, edit):
    """A Llama of which one layer is another block."""
    table = import_checkpoint(folder).model.config.to_dict()
    block = table["blocks"]["a"]
    return LanguageModelConfig(**{**table, "blocks": {"a": block, "b": EDITS[edit][0](block)}, "pattern": "a b a"}).build()


@pytest.mark.parametrize("edit", EDITS)
def test_the_layer_that_a_family_cannot_say_is_named(folder, tmp_path, edit):
    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint(with_an_odd_layer(folder, edit), tmp_path / "out", family="llama")
    assert f"llama comes nearest and cannot say layer 1 (block b): {EDITS[edit][1]}" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_without_a_family_the_nearest_is_asked(folder, tmp_path):
    export_checkpoint(with_an_odd_layer(folder, "a window"), tmp_path / "out")
    kinds = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert kinds == ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(CheckpointError, match=r"llama comes nearest and cannot say layer 1 \(block b\): mixer.type = 'mamba'"):
        export_checkpoint(with_an_odd_layer(folder, "a mamba layer"), tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and this family turns whole heads"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling both say"),
    ],
)
def test_positions_that_transformers_reads_otherwise(folder, settings, match):
    change(folder, **settings)
    refused(folder, match)


def test_what_transformers_would_read_otherwise_is_not_written(folder, tmp_path):
    """Part of a head, a length of its own for the dynamic base: no key of Llama says it."""
    table = import_checkpoint(folder).model.config.to_dict()
    dynamic = {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 16, "mode": "running"}
    for change_of in ({"fraction": 0.5}, {"scaling": dynamic}):
        table["blocks"]["a"]["mixer"]["position"] = {"type": "rope", **change_of}
        with pytest.raises(CheckpointError, match=r"llama .*cannot say"):
            export_checkpoint(LanguageModelConfig(**table).build(), tmp_path / "out", family="llama")
