"""Llama, Mixtral, gpt-oss: pre-norm stacks of attention."""

from __future__ import annotations

import transformers

from tests.models.parity.case import D_FF, D_MODEL, PRENORM, SPECIAL, Case

SIZES = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, **SPECIAL}
ATTENTION = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2, "head_dim": 12}


def llama() -> Case:
    config = transformers.LlamaConfig(
        intermediate_size=D_FF, num_hidden_layers=3, attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, **SIZES,
    )
    norm = {"type": "rms_norm", "eps": config.rms_norm_eps}
    attention = {**ATTENTION, "qkv_bias": True, "out_bias": True, "position": {"type": "rope", "theta": 1000.0}}
    block = {"mixer": attention, "channel_mixer": {"type": "swiglu", "d_ff": D_FF, "bias": True}, "norm": norm}
    return Case("LlamaForCausalLM", config, {"pattern": "a*3", "blocks": {"a": block}, "final_norm": norm})


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        intermediate_size=D_FF, num_hidden_layers=3, sliding_window=7, num_local_experts=5, num_experts_per_tok=2,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, **SIZES,
    )
    norm = {"type": "rms_norm", "eps": 1e-5}
    attention = {**ATTENTION, "window": 7, "position": {"type": "rope", "theta": 1000.0}}
    experts = {"type": "mixtral_moe", "n_experts": 5, "top_k": 2, "d_ff": D_FF}
    block = {"mixer": attention, "channel_mixer": experts, "norm": norm}
    rules = (*PRENORM, (r"\.channel_mixer\.gate\.", ".channel_mixer.router."))
    return Case("MixtralForCausalLM", config, {"pattern": "a*3", "blocks": {"a": block}, "final_norm": norm}, rules)


def gpt_oss() -> Case:
    yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = transformers.GptOssConfig(
        intermediate_size=20, num_hidden_layers=4, sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
        swiglu_limit=0.8, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "original_max_position_embeddings": 16, **yarn}, **SIZES,
    )
    norm = {"type": "rms_norm", "eps": 1e-5}
    scaling = {"type": "yarn", "original_max_len": 16, **yarn}
    attention = {
        **ATTENTION, "sinks": True, "qkv_bias": True, "out_bias": True,
        "position": {"type": "rope", "theta": 1000.0, "scaling": scaling},
    }
    experts = {"type": "gpt_oss_moe", "n_experts": 5, "top_k": 2, "d_ff": 20, "limit": 0.8}
    blocks = {
        "s": {"mixer": {**attention, "window": 6}, "channel_mixer": experts, "norm": norm},
        "a": {"mixer": attention, "channel_mixer": experts, "norm": norm},
    }
    ours = {"pattern": "(s a)*2", "blocks": blocks, "final_norm": norm}
    return Case("GptOssForCausalLM", config, ours, experts="interleaved")
