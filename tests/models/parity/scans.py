"""Mamba, Mamba-2, and their hybrids with attention: FalconMamba, Bamba, Jamba."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.parity.case import D_FF, D_MODEL, EPS, PRENORM, SPECIAL, Case

MAMBA_RULES = (
    *PRENORM, (r"^(stack\.layers\.\d+)\.norm\.", r"\1.mixer_norm."), (r"\.dt_proj\.bias$", ".dt_bias"),
    (r"\.(dt|b|c)_layernorm\.", r".\1_norm."),
)
NORM = {"type": "rms_norm", "eps": EPS}
NARROW = {"hidden_size": D_MODEL, "num_hidden_layers": 3, **SPECIAL}


def mamba(bias: bool = False, norms: bool = False) -> Case:
    """``norms``: FalconMamba."""
    kind = "FalconMamba" if norms else "Mamba"
    options: dict[str, Any] = {"mixer_rms_eps": 2e-4} if norms else {}
    options |= {"use_bias": bias, "use_conv_bias": not bias, "tie_word_embeddings": not bias}
    config = getattr(transformers, f"{kind}Config")(
        state_size=16, conv_kernel=4, expand=2, time_step_rank=5, layer_norm_epsilon=EPS, **options, **NARROW
    )
    mixer: dict[str, Any] = {"type": "mamba", "d_state": 16, "dt_rank": 5, "bias": bias, "conv_bias": not bias}
    if norms:
        mixer |= {"ssm_norm": "weightless", "eps": 2e-4}
    ours = {"pattern": "m*3", "blocks": {"m": {"mixer": mixer, "norm": NORM}}, "final_norm": NORM}
    return Case(f"{kind}ForCausalLM", config, ours, MAMBA_RULES)


def mamba2(bias: bool = False, clamp: tuple[float, float] | None = None) -> Case:
    config = transformers.Mamba2Config(
        num_heads=8, head_dim=8, state_size=16, expand=2, conv_kernel=4, n_groups=2, chunk_size=8, use_bias=bias,
        use_conv_bias=not bias, time_step_limit=clamp or (0.0, float("inf")), layer_norm_epsilon=EPS, **NARROW,
    )
    mixer: dict[str, Any] = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "eps": EPS}
    mixer |= {"bias": bias, "conv_bias": not bias}
    if clamp:
        mixer["dt_limit"] = list(clamp)
    ours = {"pattern": "m*3", "blocks": {"m": {"mixer": mixer, "norm": NORM}}, "final_norm": NORM}
    return Case("Mamba2ForCausalLM", config, ours, MAMBA_RULES)


def bamba(bias: bool = False) -> Case:
    config = transformers.BambaConfig(
        hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_indices=[1, 4], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_chunk_size=8, mamba_proj_bias=bias, mamba_conv_bias=not bias, attention_bias=bias,
        mlp_bias=bias, rms_norm_eps=EPS, **SPECIAL,
    )
    channel = {"type": "swiglu", "d_ff": D_FF, "bias": bias}
    mixer = {
        "type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "bias": bias, "conv_bias": not bias,
        "eps": EPS,
    }
    attention = {
        "type": "gqa", "n_heads": 4, "n_kv_heads": 2, "qkv_bias": bias, "out_bias": bias,
        "position": {"type": "rope", "theta": 10000.0, "fraction": 0.5},
    }
    blocks = {
        "m": {"mixer": mixer, "channel_mixer": channel, "norm": NORM},
        "a": {"mixer": attention, "channel_mixer": channel, "norm": NORM},
    }
    ours = {"pattern": "m a m*2 a m", "blocks": blocks, "final_norm": NORM}
    return Case("BambaForCausalLM", config, ours)


def jamba(bias: bool = False) -> Case:
    """Layers 1 and 4 attend, layers 1, 3 and 5 have experts."""
    config = transformers.JambaConfig(
        hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=5,
        num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=5, mamba_proj_bias=bias,
        mamba_conv_bias=not bias, rms_norm_eps=EPS, **SPECIAL,
    )
    mixer = {
        "type": "mamba", "d_state": 16, "dt_rank": 5, "bias": bias, "conv_bias": not bias, "ssm_norm": "rms", "eps": EPS,
    }
    attention = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": {"type": "none"}}
    dense = {"type": "swiglu", "d_ff": D_FF}
    experts = {"type": "moe", "n_experts": 5, "top_k": 2, "d_ff": D_FF, "normalize": False}
    blocks = {
        "m": {"mixer": mixer, "channel_mixer": dense, "norm": NORM},
        "M": {"mixer": mixer, "channel_mixer": experts, "norm": NORM},
        "a": {"mixer": attention, "channel_mixer": dense, "norm": NORM},
        "A": {"mixer": attention, "channel_mixer": experts, "norm": NORM},
    }
    ours = {"pattern": "m A m M a M", "blocks": blocks, "final_norm": NORM}
    return Case("JambaForCausalLM", config, ours, MAMBA_RULES)
