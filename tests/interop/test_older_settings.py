"""Settings as files before transformers 5 say them are the same recipe as today's, and what a family cannot say is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES
from hybridtf.interop.importing import recipe_of
from hybridtf.interop.settings import Settings

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}
YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 2.5, 3.0]}
V4 = {"num_key_value_heads": 1, "head_dim": 32, "n_routed_experts": 6, "o_groups": 2, "intermediate_size": None}
V4_LAYERS = [f"{kind}_attention" for kind in ("compressed_sparse", "heavily_compressed", *["compressed_sparse"] * 2)]
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 64}
LAYERS = ["sliding_attention"] * 5 + ["full_attention"]


def model(name: str, **settings: Any) -> Any:
    return recipe_of(FAMILIES[name], Settings({**SIZES, **settings}, "config.json")).model


PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma, by the name that means the other": (
        "gemma", {"hidden_act": "gelu", "head_dim": 12}, {"hidden_act": "gelu_pytorch_tanh", "head_dim": 12},
    ),
    "gemma2 without layer_types": (
        "gemma2", {"head_dim": 12, "hidden_act": "gelu_pytorch_tanh"},
        {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 4096},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6, "sliding_window": 8,
        },
        {
            "layer_types": LAYERS, "sliding_window": 8, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "olmo3, whose windows are not stretched": (
        "olmo3", {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", **YARN}, "layer_types": LAYERS},
        {
            "layer_types": LAYERS, "sliding_window": 4096, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
                "full_attention": {"rope_type": "yarn", "rope_theta": 500000, **YARN},
            },
        },
    ),
    "deepseek_v4, whose layers were told by ratios": (
        "deepseek_v4",
        {
            **V4, "compress_ratios": [128, 0, 4, 128, 4, 4, 0], "compress_rate_hca": 16, "num_hash_layers": 2,
            "qk_rope_head_dim": 8, "rope_scaling": {"type": "yarn", **STRETCHED},
        },
        {
            **V4, "layer_types": ["heavily_compressed_attention", "sliding_attention", *V4_LAYERS],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4, "partial_rotary_factor": 0.25, "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                "compress": {
                    "rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0,
                    **STRETCHED,
                },
            },
        },
    ),
    "phi3, by its first name of longrope": (
        "phi3", {"rope_theta": 10000.0, "rope_scaling": {"type": "su", **FACTORS}, "original_max_position_embeddings": 32},
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, "original_max_position_embeddings": 32,
            },
        },
    ),
    "exaone4 with a pattern in letters": (
        "exaone4", {"sliding_window_pattern": "LLG", "sliding_window": 8},
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "cohere2 with a pattern": (
        "cohere2", {"sliding_window_pattern": 3, "sliding_window": 8, "rotary_pct": 1.0, "use_parallel_block": True},
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "gpt_oss": (
        "gpt_oss", {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", **YARN}, "initial_context_length": 4096},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000, **YARN}, "sliding_window": 128},
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_an_older_file_is_the_same_model(case: str) -> None:
    name, older, today = PAIRS[case]
    assert model(name, **older) == model(name, **today)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 6}, "layer_types has chunked_attention; known here"),
    ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 6 layers"),
    ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'"),
]


@pytest.mark.parametrize(("name", "settings", "why"), REFUSED, ids=[f"{name}-{next(iter(s))}" for name, s, _ in REFUSED])
def test_what_a_family_cannot_say_is_refused(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        model(name, **settings)
    assert why in str(refusal.value)


def test_gemma4_numbers_its_layers_with_as_many_digits_as_the_last() -> None:
    """transformers writes "05" where there are ten layers or more."""
    wide = {"head_dim": 16, "hidden_size_per_layer_input": 0, "num_hidden_layers": 12, "layer_types": LAYERS * 2}
    padded = model("gemma4_text", **wide, per_layer_config={"05": {"head_dim": 64}, "11": {"head_dim": 64}})
    assert padded == model("gemma4_text", **wide, global_head_dim=64)
    assert [padded.blocks[name].mixer.head_dim for name in padded.layers()] == ([16] * 5 + [64]) * 2
    for key in ("12", "six"):
        with pytest.raises(CheckpointError, match=f"per_layer_config is of .*{key}.*, and there are 12 layers"):
            model("gemma4_text", **wide, per_layer_config={key: {"head_dim": 64}})
