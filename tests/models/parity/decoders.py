"""Llama, Mixtral, gpt-oss: pre-norm stacks of attention."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.parity.case import D_FF, D_MODEL, EPS, PRENORM, SPECIAL, Case

SIZES = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, **SPECIAL}
NORM = {"type": "rms_norm", "eps": EPS}
ATTENTION = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2, "head_dim": 12}


def llama() -> Case:
    config = transformers.LlamaConfig(
        intermediate_size=D_FF, num_hidden_layers=3, attention_bias=True, mlp_bias=True, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, **SIZES,
    )
    attention = {**ATTENTION, "qkv_bias": True, "out_bias": True, "position": {"type": "rope", "theta": 1000.0}}
    block = {"mixer": attention, "channel_mixer": {"type": "swiglu", "d_ff": D_FF, "bias": True}, "norm": NORM}
    return Case("LlamaForCausalLM", config, {"pattern": "a*3", "blocks": {"a": block}, "final_norm": NORM})


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        intermediate_size=D_FF, num_hidden_layers=3, sliding_window=7, num_local_experts=5, num_experts_per_tok=2,
        rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, **SIZES,
    )
    attention = {**ATTENTION, "window": 7, "position": {"type": "rope", "theta": 1000.0}}
    experts = {"type": "mixtral_moe", "n_experts": 5, "top_k": 2, "d_ff": D_FF}
    block = {"mixer": attention, "channel_mixer": experts, "norm": NORM}
    rules = (*PRENORM, (r"\.channel_mixer\.gate\.", ".channel_mixer.router."))
    return Case("MixtralForCausalLM", config, {"pattern": "a*3", "blocks": {"a": block}, "final_norm": NORM}, rules)


def gpt_oss(limit: float | None = None) -> Case:
    """``limit``: a bound of the experts' gates that many of these small numbers reach; None: the published one."""
    # The ramp runs over pairs 1.8 to 3.3 of six.
    yarn = {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.5, "truncate": False}
    config = transformers.GptOssConfig(
        intermediate_size=20, num_hidden_layers=4, sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
        swiglu_limit=limit or 7.0, max_position_embeddings=1600, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "original_max_position_embeddings": 400, **yarn}, **SIZES,
    )
    scaling = {"type": "yarn", "original_max_len": 400, **yarn}
    attention = {
        **ATTENTION, "sinks": True, "qkv_bias": True, "out_bias": True,
        "position": {"type": "rope", "theta": 1000.0, "scaling": scaling},
    }
    experts: dict[str, Any] = {"type": "gpt_oss_moe"}
    if limit is not None:
        gate = {"activation": "quick_gelu", "limit": limit, "up_shift": 1.0}
        experts = {"type": "moe", "scores": "softmax_top_k", "router_bias": True, "bias": True, **gate}
    experts |= {"n_experts": 5, "top_k": 2, "d_ff": 20}
    blocks = {
        "s": {"mixer": {**attention, "window": 6}, "channel_mixer": experts, "norm": NORM},
        "a": {"mixer": attention, "channel_mixer": experts, "norm": NORM},
    }
    ours = {"pattern": "(s a)*2", "blocks": blocks, "final_norm": NORM}
    return Case("GptOssForCausalLM", config, ours, experts="interleaved")
