"""Older names in settings of hybrids, shared blocks that are held several times, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="the oracles need transformers")
from safetensors.torch import load_file, save_file

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES, import_checkpoint
from hybridtf.interop.importing import recipe_of
from hybridtf.interop.settings import Settings
from tests.interop import tiny_oracles
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")


def settings_of(name, **changes):
    values = json.loads(tiny_oracles.make_config(name).to_json_string(use_diff=False))
    limit = {"time_step_limit": None} if "time_step_limit" in values else {}
    return {**values, **limit, **changes}


def model_of(name, **changes):
    """``changes``: None takes a setting away."""
    return recipe_of(FAMILIES[name.split("@")[0]], Settings(settings_of(name, **changes), "config.json")).model


@pytest.mark.parametrize(("name", "changes"), [
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-*EM*-ME", "num_hidden_layers": 9}),
    ("nemotron_h", {"time_step_limit": [0.0, float("inf")], "head_dim": None, "attention_head_dim": 12}),
    ("nemotron_h", {"n_groups": None, "mamba_n_groups": 2, "time_step_min": None, "mamba_dt_min": 1e-4}),
    ("granitemoehybrid", {"position_embedding_type": "nope", "layer_types": ["mamba"] * 2 + ["attention", "mamba"] * 2}),
    ("zamba2", {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"]}),
    ("zamba", {"mamba_dt_rank": 5, "attention_head_dim": None}),
    ("recurrent_gemma", {"lru_width": None, "block_types": ["recurrent", "recurrent", "attention"] * 2}),
    ("lfm2", {"layer_types": None, "intermediate_size": 7, "block_ff_dim": 60, "num_heads": 4, "block_use_swiglu": True}),
    ("lfm2", {"tie_embedding": True, "tie_word_embeddings": False}),
    ("lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention"] * 2}),
])
def test_other_words_for_the_same(name, changes):
    assert model_of(name, **changes) == model_of(name)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; known here: 0"),
    ("nemotron_h", {"time_step_limit": [0.0, 0.5]}, r"time_step_limit is \[0.0, 0.5\]"),
    ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type has conv"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias is True; known here: False"),
    ("falcon_h1", {"time_step_limit": [0.1]}, "should be two numbers"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "known here: 'nope', 'rope'"),
    ("zamba", {"mamba_proj_bias": True}, "mamba_proj_bias is true with n_mamba_heads = 2"),
    ("zamba", {"layers_block_type": ["hybrid"] * 5}, "5 entries for 6 layers"),
    ("zamba2", {"use_long_context": True}, "use_long_context is True"),
    ("recurrent_gemma", {"block_types": ["recurrent", "mlp"]}, "block_types is"),
    ("lfm2", {"layer_types": ["conv"] * 5 + ["linear"]}, "layer_types has linear; known here: full_attention, conv"),
    ("lfm2", {"conv_dim": 33}, "conv_dim is 33; known here: 32"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "exotic"}}}, "rope_type 'exotic' is not known"),
])
def test_another_model_is_refused_by_name(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        model_of(name, **changes)


@torch.no_grad()
@pytest.mark.parametrize(("name", "part"), [("zamba2", "shared_transformer"), ("zamba", "shared_transf")])
def test_a_shared_block_may_be_held_for_each_visit(name, part, tmp_path):
    one = oracle(name)
    tensors = load_file(one.folder / "model.safetensors")
    later = {"zamba2": {1: 4, 3: 6}, "zamba": {1: 5}}[name]
    for key in list(tensors):
        for first, again in later.items():
            if key.startswith(f"model.layers.{first}.{part}."):
                tensors[key.replace(f"layers.{first}.", f"layers.{again}.", 1)] = tensors[key].clone()
    (tmp_path / "config.json").write_text((one.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    model = import_checkpoint(tmp_path, dtype=torch.float64).model
    torch.testing.assert_close(model(one.ids).logits, one.want, rtol=0, atol=1e-9)
    tensors[f"model.layers.{max(later.values())}.{part}.input_layernorm.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_layernorm.weight differs from model.layers"):
        import_checkpoint(tmp_path)
