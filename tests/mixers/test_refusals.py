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
    ({"type": "gatd_delta_net"}, f"{GIVEN}: no mixer named 'gatd_delta_net'. Did you mean 'gated_delta_net'? Known: attention"),
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
