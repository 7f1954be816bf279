"""Gemma 2 and 3 and RecurrentGemma: norms that multiply by 1 + weight, scaled embeddings, capped scores."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.models.parity.case import COMMON, D_FF, D_MODEL, EPS, SPECIAL, Case

NORM = {"type": "rms_norm", "eps": EPS, "unit_offset": True}
SANDWICH_RULES = (
    *COMMON, (r"\.post_attention_layernorm\.", ".mixer_post_norm."), (r"\.pre_feedforward_layernorm\.", ".channel_norm."),
    (r"\.post_feedforward_layernorm\.", ".channel_post_norm."),
)
GRIFFIN_RULES = (
    *COMMON, (r"\.temporal_pre_norm\.", ".mixer_norm."), (r"\.channel_pre_norm\.", ".channel_norm."),
    (r"\.linear_y\.", ".gate_proj."), (r"\.linear_x\.", ".in_proj."), (r"\.linear_out\.", ".out_proj."),
    (r"\.recurrent_gate_(weight|bias)$", r".recurrence_gate.\1"), (r"\.input_gate_(weight|bias)$", r".input_gate.\1"),
    (r"\.recurrent_param$", ".Lambda"),
)
SIZES = {
    "hidden_size": D_MODEL, "intermediate_size": D_FF, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "query_pre_attn_scalar": 7, "sliding_window": 6, "rms_norm_eps": EPS,
    **SPECIAL,
}
ATTENTION = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "scale": 7**-0.5}
GEGLU = {"type": "glu", "d_ff": D_FF, "activation": "gelu_tanh"}


def _sandwich(mixer: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sandwich", "mixer": mixer, "channel_mixer": GEGLU, "norm": NORM}


def gemma2() -> Case:
    config = transformers.Gemma2Config(
        num_hidden_layers=4, attn_logit_softcapping=3.0, final_logit_softcapping=6.0, **SIZES
    )
    attention = {**ATTENTION, "softcap": 3.0}
    ours = {
        "pattern": "(s a)*2", "blocks": {"s": _sandwich({**attention, "window": 6}), "a": _sandwich(attention)},
        "final_norm": NORM, "stem": {"type": "token_embedding", "scale": "sqrt_d_model"},
    }
    return Case("Gemma2ForCausalLM", config, ours, SANDWICH_RULES, unit_offset=True, head={"softcap": 6.0})


def gemma3(factor: float | None = None) -> Case:
    """Two local layers, then a global one with a base of its own, stretched by ``factor``."""
    whole: dict[str, Any] = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {**whole, "rope_theta": 1000.0},
        },
        **SIZES,
    )
    local = {**ATTENTION, "qk_norm": NORM, "window": 6, "position": {"type": "rope", "theta": 100.0}}
    position: dict[str, Any] = {"type": "rope", "theta": 1000.0}
    if factor is not None:
        position["scaling"] = {"type": "linear", "factor": factor}
    full = {**ATTENTION, "qk_norm": NORM, "position": position}
    ours = {
        "pattern": "(s*2 a)*2", "blocks": {"s": _sandwich(local), "a": _sandwich(full)}, "final_norm": NORM,
        "stem": {"type": "token_embedding", "scale": "sqrt_d_model"},
    }
    return Case("Gemma3ForCausalLM", config, ours, SANDWICH_RULES, unit_offset=True)


def recurrent_gemma(d_inner: int | None = None, n_kv_heads: int = 1, bias: bool = False) -> Case:
    config = transformers.RecurrentGemmaConfig(
        hidden_size=D_MODEL, num_hidden_layers=6, intermediate_size=2 * D_FF, num_attention_heads=4,
        num_key_value_heads=n_kv_heads, lru_width=d_inner, attention_window_size=7, conv1d_width=4, logits_soft_cap=6.0,
        attention_bias=bias, rms_norm_eps=EPS, **SPECIAL,
    )
    mixer: dict[str, Any] = {"type": "griffin_recurrent", "n_heads": 4}
    if d_inner is not None:
        mixer["d_inner"] = d_inner
    attention = {
        "type": "gqa", "n_heads": 4, "n_kv_heads": n_kv_heads, "window": 7, "qkv_bias": bias, "out_bias": True,
        "position": {"type": "rope", "fraction": 0.5},
    }
    channel = {**GEGLU, "bias": True}
    scale = float(torch.tensor(D_MODEL**0.5, dtype=torch.bfloat16))  # rounded in every precision
    ours = {
        "pattern": "(r*2 a)*2", "final_norm": NORM, "stem": {"type": "token_embedding", "scale": scale},
        "blocks": {
            "r": {"mixer": mixer, "channel_mixer": channel, "norm": NORM},
            "a": {"mixer": attention, "channel_mixer": channel, "norm": NORM},
        },
    }
    name = "RecurrentGemmaForCausalLM"
    return Case(name, config, ours, GRIFFIN_RULES, unit_offset=True, head={"softcap": 6.0})
