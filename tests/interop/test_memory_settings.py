"""Families with delta-rule memories: older and published forms of their settings, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the oracles need transformers")
from safetensors.torch import load_file, save_file

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES, import_checkpoint
from hybridtf.interop.importing import recipe_of
from hybridtf.interop.settings import Settings
from tests.interop import tiny_oracles

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


def settings_of(name, drop=(), **changes):
    given = tiny_oracles.make_config(name).to_dict()
    return {key: value for key, value in given.items() if key not in drop} | changes


def layers_of(settings):
    config = recipe_of(FAMILIES[settings["model_type"]], Settings(settings, "config.json")).model
    return [config.blocks[name] for name in config.layers()]


def test_kimi_in_the_published_form():
    """Layers counted from 1 in two lists, and the sizes of a memory in a table of their own."""
    said = {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4}
    drop = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    published = settings_of(
        "kimi_linear", drop, linear_attn_config=said, first_k_dense_replace=1, moe_router_activation_func="sigmoid",
        mla_use_nope=True, rope_theta=10000.0, use_grouped_topk=True, moe_layer_freq=1, num_nextn_predict_layers=0,
    )
    own = settings_of("kimi_linear", mlp_layer_types=["dense", *["sparse"] * 4])
    assert layers_of(published) == layers_of(own)
    with pytest.raises(CheckpointError, match="layer_types has none; known here: linear_attention, full_attention"):
        layers_of({**published, "linear_attn_config": {**said, "kda_layers": [1, 2]}})
    with pytest.raises(CheckpointError, match="mla_use_nope is False; known here: True"):
        layers_of({**published, "mla_use_nope": False})


def test_qwen_with_the_keys_of_older_files():
    old = settings_of(
        "qwen3_next", ("layer_types", "rope_parameters"), rope_theta=1000.0, partial_rotary_factor=0.25, rope_scaling=None,
        full_attention_interval=3, use_sliding_window=False, max_window_layers=5,
    )
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"]
    assert layers_of(old) == layers_of(settings_of("qwen3_next", layer_types=kinds))
    with pytest.raises(CheckpointError, match="use_sliding_window is True; known here: False"):
        layers_of({**old, "use_sliding_window": True})


def test_a_head_for_further_tokens_is_left_unread(tmp_path):
    tiny_oracles.save("qwen3_next", str(tmp_path))
    ids, file = tiny_oracles.inputs("qwen3_next")["input_ids"], tmp_path / "model.safetensors"
    tensors, want = load_file(file), import_checkpoint(tmp_path).model(ids).logits
    save_file({**tensors, "mtp.fc.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    assert torch.equal(import_checkpoint(tmp_path).model(ids).logits, want)
    save_file({**tensors, "model.layers.9.fc.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="in no layer that the settings ask for"):
        import_checkpoint(tmp_path)


def test_olmo_tells_positions_unless_their_base_is_null():
    said = settings_of("olmo_hybrid"), settings_of("olmo_hybrid@nope"), settings_of("olmo_hybrid", ["rope_parameters"])
    mixers = [block.mixer for settings in said for block in layers_of(settings)]
    kinds = [mixer.position.type for mixer in mixers if mixer.type == "attention"]
    assert kinds == ["rope", "rope", "none", "none", "rope", "rope"]


def test_glm_says_who_reads_whose_choice():
    given = settings_of("glm5_next")
    text = given["text_config"]

    def choices(**changes):
        layers = layers_of({**given, "text_config": {**text, **changes}})
        return [getattr(block.mixer, "index_choice", None) for block in layers]

    assert choices() == [None, "write", "read", None, "write", "read"]
    assert choices(indexer_types=None, index_topk_pattern="FFFFFS") == [None, "own", "own", None, "write", "read"]
    with pytest.raises(CheckpointError, match=r"indexer_types\[1\] is 'shared', and no indexer stands in the layer before it"):
        choices(indexer_types=["full", "shared", "full", "full", "full", "full"])
    for floor in (-3.0, None):
        layers = layers_of({**given, "text_config": {**text, "linear_lower_bound": floor}})
        assert layers[0].mixer.decay_floor == floor


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_attention_heads is 6; decays are known for powers of two"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and this family turns whole heads"),
    ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 6 layers"),
])
def test_minimax_refuses_what_it_does_not_know(changes, words):
    with pytest.raises(CheckpointError, match=words):
        layers_of(settings_of("minimax", **changes))
