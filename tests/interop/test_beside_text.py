"""Checkpoints with parts for pictures and heads for further tokens: the text is read, and the rest is said."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", reason="the references need transformers")
import transformers

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES, import_checkpoint
from hybridtf.interop.beside_text import text_settings
from hybridtf.interop.importing import table_of
from hybridtf.interop.settings import Settings
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
EXPERTS_ALONE = {name: value for name, value in TEXT.items() if name != "intermediate_size"}
PICTURES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MARKS = {"image_token_id": 58, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 56}
NEAR_AND_FAR = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "head_dim": 8, "sliding_window": 4, "hidden_size_per_layer_input": 4,
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {
        "text_config": {**TEXT, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, "vision_config": PICTURES,
        "image_token_index": 60, "mm_tokens_per_image": 4,
    }),
    "llava": ("Llava", {
        "text_config": {"model_type": "llama", **TEXT}, "image_token_index": 60,
        "vision_config": {"model_type": "clip_vision_model", **PICTURES},
    }),
    "mistral3": ("Mistral3", {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8}, "image_token_index": 60,
        "vision_config": {"model_type": "pixtral", **PICTURES},
    }),
    "qwen3_5": ("Qwen3_5", {
        "text_config": {**TEXT, **LINEAR, "num_hidden_layers": 4, "head_dim": 8}, **MARKS,
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "deepstack_visual_indexes": [],
        },
    }),
    "llama4": ("Llama4", {
        "text_config": {
            **TEXT, "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
        },
        "vision_config": {
            **PICTURES, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 60,
    }),
    "internvl": ("InternVL", {
        "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": 60,
        "vision_config": {**PICTURES, "image_size": [28, 28], "patch_size": [14, 14]},
    }),
    "lfm2_vl": ("Lfm2Vl", {
        "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention", "conv"]},
        "vision_config": {"model_type": "siglip2_vision_model", **PICTURES, "num_patches": 4}, "image_token_id": 60,
    }),
    "gemma3n": ("Gemma3n", {
        "text_config": {
            **TEXT, **NEAR_AND_FAR, "vocab_size_per_layer_input": 56, "altup_num_inputs": 2, "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
        "vision_config": {"hidden_size": 16, "vocab_size": 2, "vocab_offset": 56},
        "audio_config": {
            "hidden_size": 16, "vocab_size": 3, "vocab_offset": 58, "input_feat_size": 16, "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 2, "sscp_conv_channel_size": [4, 4],
        },
    }),
    "gemma4": ("Gemma4", {
        "text_config": {**TEXT, **NEAR_AND_FAR, "vocab_size_per_layer_input": 61, "global_head_dim": 16},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
            "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16,
        },
        "audio_config": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
        "image_token_id": 60, "video_token_id": 59, "audio_token_id": 58,
    }),
    "minimax_m3_vl": ("MiniMaxM3VL", {
        "text_config": {
            **TEXT, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 40,
            "shared_intermediate_size": 20, "mlp_layer_types": ["dense", "sparse", "sparse"], "rotary_dim": 8,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
            "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
        },
        "vision_config": PICTURES, "image_token_index": 60, "video_token_index": 59, "projector_hidden_size": 32,
    }),
    "qwen4_exp": ("Qwen4Exp", {
        "text_config": {
            **EXPERTS_ALONE, **LINEAR, "num_hidden_layers": 4, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4,
            "shared_expert_intermediate_size": 12, "num_experts_per_tok": 2, "hc_count": 2, "hc_lowrank": 4,
            "ple_layer_ids": [2], "ple_embed_dim": 8, "heads_per_ngram": 2, "ngram_vocab_size_base": 31,
            "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 32, "indexer_compress_ratio": 4,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "num_position_embeddings": 16,
        },
        **MARKS,
    }),
}
CLASSES = {"minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration"}
"""Those that are not called after their config."""


class Tower(nn.Module):
    """In place of Gemma 3n's, which is of a package that the tests do not have; called alike on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.timm_model = nn.Linear(3, 3)


def part_of(config: Any, **options: Any) -> nn.Module:
    return Tower() if config.model_type == "gemma3n_vision" else transformers.AutoModel.from_config(config, **options)


def saved(name: str, folder: Path) -> Any:
    """A model of pictures and text with weights of its own."""
    prefix, settings = WHOLE[name]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(0)
    kind = getattr(transformers, CLASSES.get(name, f"{prefix}ForConditionalGeneration"))
    with patch.object(sys.modules[kind.__module__], "AutoModel", SimpleNamespace(from_config=part_of), create=True):
        model = kind._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.5 if one.ndim < 2 else 0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", WHOLE)
def test_text_of_a_larger_model(tmp_path: Path, name: str) -> None:
    model = saved(name, tmp_path)
    ids = torch.randint(3, 55, (2, 17), generator=torch.Generator().manual_seed(0))
    text = model.language_model if name == "llama4" else model  # the whole cannot be called without pictures there
    want = text(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    found = import_checkpoint(tmp_path)
    torch.testing.assert_close(found.model(ids).logits, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert found.notes[0] == f"the text of a {name}, read as {found.family.model_type}"
    held = load_file(tmp_path / "model.safetensors")
    n = sum("vision" in one or ".visual." in one for one in held)
    assert f"left aside: {n} tensors of the vision" in found.notes
    n = sum("audio" in one for one in held)
    assert (f"left aside: {n} tensors of the audio" in found.notes) == (n > 0)


def test_what_is_not_known_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    saved("llava", tmp_path / "llava")
    file = tmp_path / "llava" / "config.json"
    settings = json.loads(file.read_text())
    for change, why in (
        ({"attention_sink": 4}, "config.json: attention_sink is not known"),
        ({"text_config": {**settings["text_config"], "model_type": "opts"}}, "no family reads model_type 'opts'"),
        ({"text_config": {**settings["text_config"], "twist": 1}}, "text_config: twist is not known"),
        ({"tie_word_embeddings": None, "text_config": {**settings["text_config"], "tie_word_embeddings": True}}, "llava takes"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(CheckpointError, match=why):
            import_checkpoint(tmp_path / "llava")
    file.write_text(json.dumps(settings))
    tensors = load_file(tmp_path / "llava" / "model.safetensors")
    save_file({**tensors, "speech_tower.weight": torch.ones(1)}, tmp_path / "llava" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"speech_tower.weight is in the files and in no layer"):
        import_checkpoint(tmp_path / "llava")


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("name", ["minimax_m3_vl", "qwen4_exp"])
def test_whether_a_head_is_tied(name: str, outer: bool, own: bool) -> None:
    whole = {"text_config": {"tie_word_embeddings": own}, "tie_word_embeddings": outer}
    config = getattr(transformers, f"{WHOLE[name][0]}Config")(**json.loads(json.dumps(whole)))
    text = text_settings(Settings({"model_type": name, **whole}, "config.json"))
    assert text.flag("tie_word_embeddings") == config.tie_word_embeddings


def test_sizes_that_gemma_leaves_out() -> None:
    """The published file of Gemma 3 with 4B parameters."""
    whole = {
        "model_type": "gemma3", "mm_tokens_per_image": 256, "boi_token_index": 255999, "eoi_token_index": 256000,
        "image_token_index": 262144, "initializer_range": 0.02, "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }
    today = transformers.Gemma3Config(**json.loads(json.dumps(whole))).text_config.to_dict()
    both = (whole, {**today, "model_type": "gemma3_text"})
    ours, theirs = (table_of(FAMILIES["gemma3_text"], text_settings(Settings(one, "config.json"))) for one in both)
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "tensor", "settings"),
    [
        ("deepseek_v3", "model.layers.{n}.eh_proj.weight", {"num_nextn_predict_layers": 1}),
        ("glm_moe_dsa", "model.layers.{n}.eh_proj.weight", {"num_nextn_predict_layers": 1}),
        ("qwen3_next", "mtp.fc.weight", {}),
        ("mimo_v2_flash", "model.mtp.layers.0.eh_proj.weight", {}),
    ],
)
def test_heads_for_further_tokens_are_left_aside_and_said(
    tmp_path: Path, name: str, tensor: str, settings: dict[str, Any]
) -> None:
    folder = shutil.copytree(oracle(name).folder, tmp_path / name)
    file = folder / "config.json"
    table = json.loads(file.read_text())
    tensor = tensor.format(n=table["num_hidden_layers"])
    file.write_text(json.dumps(table | settings))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, tensor: torch.ones(2, 2)}, folder / "model.safetensors")
    want = f"left aside: 1 tensor of a head that tells further tokens: {tensor}"
    assert want in import_checkpoint(folder).notes


def test_a_layer_more_that_no_setting_tells_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(oracle("deepseek_v3").folder, tmp_path / "model")
    n = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"model.layers.{n}.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model.layers.{n}.eh_proj.weight is in the files and in no layer"):
        import_checkpoint(folder)
