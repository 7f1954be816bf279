"""GGUF files, written here by the package gguf: the scores that transformers has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf", reason="the files need it")
pytest.importorskip("transformers", reason="the references need transformers")
import gguf
import transformers

from hybridtf.core import CheckpointError
from hybridtf.interop import import_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES), "llama, tied": ("Llama", {**SIZES, "tie_word_embeddings": True}), "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 128}),  # the width that its reader takes all heads to have
}
KINDS = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def drawn(name: str) -> Any:
    """A model with weights of its own."""
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**settings))
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(1.0 if one.ndim < 2 else 0.0, 0.1)
    return model


def write(model: Any, file: Path, kind: str = "F32", **more: Any) -> Path:
    """As the converters of llama.cpp do; ``more``: further keys of the architecture."""
    config, name = model.config, model.config.model_type
    writer = gguf.GGUFWriter(str(file), name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim if name == "qwen3" else config.hidden_size // config.num_attention_heads)
    if name == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for key, value in more.items():
        writer.add_float32(f"{name}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name], config.num_hidden_layers)
    for one, x in model.state_dict().items():
        if one == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and ("q_proj" in one or "k_proj" in one):  # pairs of llama.cpp lie beside each other
            n = config.num_attention_heads if "q_proj" in one else config.num_key_value_heads
            x = x.reshape(n, 2, -1, x.shape[-1]).transpose(1, 2).reshape(x.shape)
        data = x.numpy().astype(numpy.float32)
        quantised = KINDS["F32"] if x.ndim < 2 else KINDS[kind]
        packed = gguf.quantize(data, quantised)
        writer.add_tensor(names.get_name(one, try_suffixes=(".weight", ".bias")), packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    model = drawn(name)
    file = write(model, tmp_path / "tiny.gguf", kind)
    ids = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    want = theirs(ids).logits
    found = import_checkpoint(file)
    assert_near(found.model(ids).logits, want)
    if kind == "F32":
        assert found.notes == ()
        assert_near(want, model(ids).logits)
    else:
        assert f"of {kind} multiplied out to float32" in found.notes[0]
    assert (found.dtype, found.recipe.model.d_model) == (torch.float32, 64)


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_what_the_reader_passes_over_is_refused(tmp_path: Path) -> None:
    model = drawn("llama")
    file = write(model, tmp_path / "scaled.gguf", rope__scaling__factor=8.0)
    with pytest.raises(CheckpointError, match=r"llama.rope.scaling.factor is 8.0, and transformers' reader passes it over"):
        import_checkpoint(file)
    narrow = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=32))
    with pytest.raises(CheckpointError, match=r"qwen3.attention.key_length is 32, where transformers takes heads to be 128"):
        import_checkpoint(write(narrow, tmp_path / "narrow.gguf"))
    writer = gguf.GGUFWriter(str(tmp_path / "mamba.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"GGUF files of 'mamba' are not read; read are llama, qwen2, qwen3"):
        import_checkpoint(tmp_path / "mamba.gguf")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none.gguf: no such file"):
        import_checkpoint(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no file of tensors")
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        import_checkpoint(tmp_path / "text.gguf")
    whole = write(drawn("llama"), tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        import_checkpoint(tmp_path / "cut.gguf")


def test_a_tensor_that_the_reader_leaves_unread_is_refused(tmp_path: Path) -> None:
    """How llama.cpp stretches the positions of Llama 3."""
    model = drawn("llama")
    model.register_buffer("rope_freqs", torch.ones(8))
    original = gguf.TensorNameMap.get_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.TensorNameMap, "get_name",
            lambda self, key, **more: "rope_freqs.weight" if key == "rope_freqs" else original(self, key, **more),
        )
        file = write(model, tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is in the file, and transformers' reader leaves it unread"):
        import_checkpoint(file)
