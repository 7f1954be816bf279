"""Dense families in variants and spellings that the oracles do not have: as transformers computes them, and back."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="the references need transformers")
import transformers

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES, export_checkpoint, import_checkpoint
from hybridtf.interop.importing import recipe_of
from hybridtf.interop.settings import Settings
from tests.interop import tiny_oracles
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")

FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 40}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40, "max_position_embeddings": 32}
DENSE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "falcon-7b": ("Falcon", FALCON),
    "falcon, parallel, a key head each": ("Falcon", {**FALCON, "multi_query": False}),
    "falcon, one norm": ("Falcon", {
        **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    }),
    "opt, norms after": ("OPT", {**OPT, "do_layer_norm_before": False}),
    "opt, plain": ("OPT", {**OPT, "layer_norm_elementwise_affine": False, "enable_bias": False}),
    "gpt2, scales": ("GPT2", {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
    }),
    "bloom, normed stream": ("Bloom", {
        "hidden_size": 32, "n_layer": 2, "n_head": 4, "apply_residual_connection_post_layernorm": True,
    }),
    "mpt, bounds and scale": ("Mpt", {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
    }),
    "stablelm, parallel": ("StableLm", {**DENSE, "use_parallel_residual": True, "qk_layernorm": True}),
    "hunyuan, alpha": ("HunYuanDenseV1", {
        **DENSE, "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    }),
    "glm4, whole heads": ("Glm4", {**DENSE, "head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
}
GEMMA = {
    **DENSE, "head_dim": 12, "sliding_window": 5, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VARIANTS |= {
    "gemma3n, fewer tokens with embeddings for each layer": ("Gemma3nText", {
        **GEMMA, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 0,
        "altup_num_inputs": 2, "laurel_rank": 3, "intermediate_size": [40, 24, 40, 24], "attention_bias": True,
    }),
    "gemma4, dense": ("Gemma4Text", {**GEMMA, "global_head_dim": 16, "hidden_size_per_layer_input": 0}),
    "gemma4, wide where keys are shared": ("Gemma4Text", {
        **GEMMA, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 70,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_bias": True, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }),
}
SPECIAL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_transformers_and_comes_back(name, tmp_path):
    family, options = VARIANTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, **SPECIAL)
    theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in theirs.parameters():
        parameter.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = import_checkpoint(tmp_path / "theirs")
    assert ours.dtype == torch.float64
    ids = torch.randint(3, 61, (2, 19))
    with tiny_oracles.strict_float64():
        again = type(theirs).from_pretrained(tmp_path / "theirs", dtype=torch.float64).eval()
        want = again(input_ids=ids, use_cache=False).logits
    got = ours.model(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7 if family == "Bloom" else 1e-9)  # its GELU, see LOOSER
    export_checkpoint(ours.model, tmp_path / "back", family=ours.family.model_type)
    torch.testing.assert_close(import_checkpoint(tmp_path / "back").model(ids).logits, got, rtol=0, atol=0)


def respelled(name, folder, edit, **settings):
    """An oracle with other tensors and settings; None: without."""
    shutil.copytree(oracle(name).folder, folder)
    table = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    weights = folder / "model.safetensors"
    save_file(edit(load_file(weights)), weights, metadata={"format": "pt"})
    return folder


def headless(tensors):
    return {name.removeprefix("transformer."): value for name, value in tensors.items()}


@torch.no_grad()
def test_gpt2_without_the_prefix_and_with_its_masks(tmp_path):
    def older(tensors):
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(3)}
        return {**headless(tensors), **masks}

    tasks = {"text-generation": {"max_length": 50}}
    folder = respelled("gpt2", tmp_path / "older", older, n_ctx=64, task_specific_params=tasks)
    one = oracle("gpt2")
    got = import_checkpoint(folder, dtype=torch.float64).model(one.ids).logits
    torch.testing.assert_close(got, one.want, rtol=0, atol=1e-9)


@torch.no_grad()
def test_bloom_as_it_was_published(tmp_path):
    folder = respelled(
        "bloom", tmp_path / "older", headless, hidden_size=None, n_embed=48, n_head=None, num_attention_heads=6, seq_length=64,
        offset_alibi=100, skip_bias_add=True, skip_bias_add_qkv=False, attention_softmax_in_fp32=True, unk_token_id=0,
    )
    one = oracle("bloom")
    got = import_checkpoint(folder, dtype=torch.float64).model(one.ids).logits
    torch.testing.assert_close(got, one.want, rtol=0, atol=1e-8)


def table_of(name, **settings):
    return recipe_of(FAMILIES[name], Settings(settings, "config.json")).model


def test_pythia_says_rotations_in_the_older_words():
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 61,
        "hidden_act": "gelu_fast", "max_position_embeddings": 64,
    }
    older = table_of("gpt_neox", **sizes, rotary_pct=0.5, rotary_emb_base=5000)
    assert older == table_of("gpt_neox", **sizes, rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": 0.5})
    position = older.blocks[older.layers()[0]].mixer.position
    assert (position.theta, position.fraction) == (5000.0, 0.5)


def test_falcon_with_alibi_says_where_the_reference_rounds():
    one = import_checkpoint(oracle("falcon@alibi").folder)
    assert len(one.notes) == 1
    assert "rounds ALiBi to bfloat16" in one.notes[0]
    assert "after the 256th differ" in one.notes[0]
    assert import_checkpoint(oracle("falcon").folder).notes == ()


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("gptj", {"rotary_dim": None}, "rotary_dim is null"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("falcon", {"parallel_attn": False}, "parallel_attn = false is no model"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3; known here: 2, 1"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi is False"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16"),
        ("diffllama", {"num_key_value_heads": 1}, "4 heads with 1 of keys are no pairs"),
        ("olmo2", {"clip_qkv": 1.0}, "clip_qkv is not known of this family"),
    ],
)
def test_what_no_model_of_ours_is_is_refused(name, settings, match):
    table = json.loads((oracle(name).folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=match):
        recipe_of(FAMILIES[name], Settings({**table, **settings}, "config.json"))
