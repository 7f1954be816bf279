"""Wrong options of mixers inside a model: each message says where, what, and what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.models import LanguageModelConfig

GIVEN, BUILT = "blocks.x.mixer", "model.blocks.x.mixer"  # refused when it is written down, or when widths are known

CASES: list[tuple[dict[str, Any], str]] = [
    ({"type": "gatd_delta_net"}, f"{GIVEN}: no mixer named 'gatd_delta_net'. Did you mean 'gated_delta_net'? Known: gated"),
    ({"type": "gla", "n_heds": 5}, f"{GIVEN}.n_heds: unknown option. Did you mean 'n_heads'? Known: chunk_size, conv_kernel"),
    ({"type": "delta_net"}, f"{GIVEN}.n_heads: is required"),
    ({"type": "gla", "decay_rank": 0}, f"{GIVEN}.decay_rank: input should be greater than 0, got 0"),
    ({"type": "gla", "n_heads": 5}, f"{BUILT}: expand_k * d_model = 6 does not divide into n_heads = 5 heads"),
    ({"type": "cosformer", "n_heads": 5}, f"{BUILT}: d_model = 12 does not divide into n_heads = 5 heads"),
    ({"type": "rwkv7", "head_dim": 5}, f"{BUILT}: d_model = 12 is not divisible by head_dim = 5"),
    (
        {"type": "differential_attention", "n_heads": 4},
        f"{BUILT}: d_model = 12 is not divisible by 2 x n_heads = 8; give head_dim",
    ),
    ({"type": "attention", "n_heads": 4}, f"{BUILT}.position: rope rotates pairs: head_dim 3 x fraction 1.0 = 3 must be even"),
    ({"type": "s4d", "chunk_size": 12}, f"{GIVEN}.chunk_size: 12 must be a power of 2"),
    ({"type": "s4", "d_state": 5}, f"{BUILT}.ssm: d_state = 5 must be even: states come in conjugate pairs"),
    ({"type": "kda", "n_heads": 3, "a_range": [2.0, 1.0]}, f"{GIVEN}.a_range: [2.0, 1.0] must be two rising positive numbers"),
    (
        {"type": "linear_attention", "n_heads": 4, "decay": [0.5, 0.5]},
        f"{GIVEN}: decay has 2 numbers for 4 kv heads",
    ),
    (
        {"type": "rwkv7", "head_dim": 4, "value_residual": "latr"},
        "input should be 'none', 'auto', 'first' or 'later', got 'latr'",
    ),
    (
        {"type": "rwkv7", "head_dim": 4, "value_residual": "later"},
        f"{BUILT}: layer 0 reads the edge 'rwkv7_first_values', which",
    ),
    (
        {"type": "lora", "mixer": {"type": "attention", "n_heads": 2}, "on": ["q_prj"]},
        f"{BUILT}: no projection named 'q_prj' in it. Did you mean 'q_proj'? Known: k_proj, out_proj, q_proj, v_proj",
    ),
    ({"type": "bidirectional", "mixer": {"type": "gla"}}, f"{BUILT}: 'bidirectional' looks ahead, and this stack is causal"),
    ({"type": "cross_attention", "n_heads": 4}, f"{BUILT}: layer 0 looks at a context, and this model has none to give"),
]


@pytest.mark.parametrize(("mixer", "message"), CASES, ids=[f"{mixer['type']}-{i}" for i, (mixer, _) in enumerate(CASES)])
def test_a_wrong_option_is_refused_by_its_place(mixer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LanguageModelConfig(vocab_size=7, d_model=12, pattern="x*2", blocks={"x": {"mixer": mixer}}).build()

@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_of_any_option_are_finite(value) -> None:
    """TOML can write nan and inf; no component computes anything with them."""
    kinds = ("mixers", "channel_mixers", "blocks", "stems", "norms", "positions", "tasks")
    seen = 0
    for kind in kinds:
        for config in active()[kind].configs().values():
            tiny = config.tiny()
            for name in config.model_fields:
                if type(getattr(tiny, name)) is float:
                    seen += 1
                    with pytest.raises(RecipeError, match=f"{name}: input should be"):
                        config(**{**dict(tiny), name: value})
    assert seen > 60


IDLE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    *(
        (
            {"type": name, "d_conv": 0, **more},
            'conv_kernel = "windows" does nothing beside d_conv = 0', {"conv_kernel": "windows"},
        )
        for name, more in (
            ("gla", {"n_heads": 2}), ("gsa", {}), ("hgrn", {}), ("hgrn2", {"head_dim": 4}), ("lightnet", {"n_heads": 2}),
            ("simple_gla", {}), ("path_attention", {"n_heads": 4}), ("slstm", {}), ("ttt_linear", {"n_heads": 2}),
        )
    ),
    *(
        ({"type": name, "d_conv": 0, **more}, "conv_bias = true does nothing beside d_conv = 0", {"conv_bias": True})
        for name, more in (("lightnet", {"n_heads": 2}), ("simple_gla", {}))
    ),
    *(
        ({"type": "gated_delta_product", "n_heads": 2, "head_dim": 4, "forget_gate": False}, message, option)
        for message, option in (
            ("a_range = [1.0, 2.0] does nothing beside forget_gate = false", {"a_range": [1.0, 2.0]}),
            ("dt_range = [0.1, 0.2] does nothing beside forget_gate = false", {"dt_range": [0.1, 0.2]}),
            ("dt_floor = 0.5 does nothing beside forget_gate = false", {"dt_floor": 0.5}),
            (
                "a_range = [1.0, 2.0] and dt_floor = 0.5 do nothing beside forget_gate = false",
                {"a_range": [1.0, 2.0], "dt_floor": 0.5},
            ),
        )
    ),
    (
        {"type": "gated_delta_net", "n_heads": 2, "head_dim": 4, "output_gate": False},
        'gate_activation = "sigmoid" does nothing beside output_gate = false', {"gate_activation": "sigmoid"},
    ),
    ({"type": "titans", "n_heads": 2, "memory_layers": 1}, "memory_width = 8 does nothing beside", {"memory_width": 8}),
    ({"type": "strided_sparse", "n_heads": 2}, 'n_summary = 4 does nothing beside pattern = "strided"', {"n_summary": 4}),
    ({"type": "relative_attention", "n_heads": 2}, 'qk_clip = 3.0 does nothing beside qk_norm = "rms"', {"qk_clip": 3.0}),
    ({"type": "relative_attention", "n_heads": 2}, "log_alpha = 0.5 does nothing beside no log_floor", {"log_alpha": 0.5}),
    (
        {"type": "forgetting_attention", "n_heads": 2},
        "eps = 0.1 does nothing beside qk_norm = false and output_norm = false", {"eps": 0.1},
    ),
    (
        {"type": "forgetting_attention", "n_heads": 2, "output_norm": True},
        'conv_kernel = "windows" does nothing beside kv_shift = false', {"conv_kernel": "windows"},
    ),
    ({"type": "mamba"}, 'eps = 0.1 does nothing beside ssm_norm = "none"', {"eps": 0.1}),
]


@pytest.mark.parametrize(("mixer", "message", "option"), IDLE, ids=[f"{m['type']}-{'-'.join(o)}" for m, _, o in IDLE])
def test_an_option_that_would_do_nothing_is_refused(mixer: dict[str, Any], message: str, option: dict[str, Any]) -> None:
    def config(given: dict[str, Any]) -> LanguageModelConfig:
        return LanguageModelConfig(vocab_size=7, d_model=12, pattern="x*2", blocks={"x": {"mixer": given}})

    with pytest.raises(ConfigError, match=re.escape(f"{GIVEN}: {message}")):
        config({**mixer, **option})
    written = config(mixer).to_dict()["blocks"]["x"]["mixer"]
    assert set(option) - {"memory_width"} <= set(written), "a recipe that is written back names it at its default"
    config(written).build()
