"""Mamba or Mamba-2 with attention, some with experts: Bamba, Jamba, GraniteMoeHybrid, NemotronH."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.parity.case import D_FF, D_MODEL, EPS, SPECIAL, Case
from tests.models.parity.scans import MAMBA_RULES, NORM

SIZES = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2, **SPECIAL}
NOPE = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": {"type": "none"}}
RULES = (
    *MAMBA_RULES, (r"\.block_sparse_moe\.", ".channel_mixer."), (r"\.shared_mlp\.", ".channel_mixer.shared."),
    (r"\.output_linear\.", ".down_proj."),
)
ONE_BRANCH_RULES = (
    *MAMBA_RULES,
    (r"\.mixer\.(gate|experts|shared_experts|fc\d_latent_proj)\.", r".channel_mixer.\1."),
    (r"\.mixer\.(up_proj|down_proj)\.", r".channel_mixer.\1."),
    (r"\.channel_mixer\.gate\.e_score_correction_bias$", ".channel_mixer.selection.bias"),
    (r"\.channel_mixer\.gate\.", ".channel_mixer.router."), (r"\.shared_experts\.", ".shared."),
    (r"\.fc1_latent_proj\.", ".latent_in."), (r"\.fc2_latent_proj\.", ".latent_out."),
    (r"^(stack\.layers\.[135])\.mixer_norm\.", r"\1.channel_norm."),
)
"""A layer has one branch, called ``mixer`` whatever it is; here it is a channel mixer in layers 1, 3 and 5."""


def bamba(bias: bool = False) -> Case:
    config = transformers.BambaConfig(
        intermediate_size=D_FF, num_hidden_layers=6, attn_layer_indices=[1, 4], mamba_n_heads=8, mamba_d_head=8,
        mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8,
        mamba_proj_bias=bias, mamba_conv_bias=not bias, attention_bias=bias,
        mlp_bias=bias, rms_norm_eps=EPS, **SIZES,
    )
    channel = {"type": "swiglu", "d_ff": D_FF, "bias": bias}
    mixer = {
        "type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "bias": bias, "conv_bias": not bias, "eps": EPS,
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
    return Case("BambaForCausalLM", config, ours, RULES)


def jamba(bias: bool = False) -> Case:
    """Layers 1 and 4 attend, layers 1, 3 and 5 have experts."""
    config = transformers.JambaConfig(
        intermediate_size=D_FF, num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=5, num_experts_per_tok=2,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=5, mamba_proj_bias=bias,
        mamba_conv_bias=not bias, rms_norm_eps=EPS, **SIZES,
    )
    mixer = {
        "type": "mamba", "d_state": 16, "dt_rank": 5, "bias": bias, "conv_bias": not bias, "ssm_norm": "rms", "eps": EPS,
    }
    dense = {"type": "swiglu", "d_ff": D_FF}
    experts = {"type": "moe", "n_experts": 5, "top_k": 2, "d_ff": D_FF, "normalize": False}
    blocks = {
        "m": {"mixer": mixer, "channel_mixer": dense, "norm": NORM},
        "M": {"mixer": mixer, "channel_mixer": experts, "norm": NORM},
        "a": {"mixer": NOPE, "channel_mixer": dense, "norm": NORM},
        "A": {"mixer": NOPE, "channel_mixer": experts, "norm": NORM},
    }
    ours = {"pattern": "m A m M a M", "blocks": blocks, "final_norm": NORM}
    return Case("JambaForCausalLM", config, ours, RULES)


def granite() -> Case:
    config = transformers.GraniteMoeHybridConfig(
        intermediate_size=20, num_hidden_layers=4, embedding_multiplier=3.1, logits_scaling=1.7, residual_multiplier=0.37,
        attention_multiplier=0.21, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=24, mamba_n_heads=8,
        mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], rms_norm_eps=EPS, **SIZES,
    )
    experts = {"type": "moe", "n_experts": 5, "top_k": 2, "d_ff": 20, "scores": "softmax_top_k", "d_ff_shared": 24}
    rest = {"channel_mixer": experts, "norm": NORM, "residual_scale": 0.37}
    mixer = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "eps": EPS}
    ours = {
        "pattern": "m*2 a m", "blocks": {"m": {"mixer": mixer, **rest}, "a": {"mixer": {**NOPE, "scale": 0.21}, **rest}},
        "final_norm": NORM, "stem": {"type": "token_embedding", "scale": 3.1},
    }
    return Case("GraniteMoeHybridForCausalLM", config, ours, RULES, head={"scale": 1 / 1.7})


def nemotron(latent: bool = False) -> Case:
    """Layers of one branch. ``latent``: the experts work in a narrower space."""
    more = {"moe_latent_size": 14} if latent else {}
    config = transformers.NemotronHConfig(
        intermediate_size=40, layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
        head_dim=12, ssm_state_size=16, mamba_num_heads=6, mamba_head_dim=8, n_groups=2, conv_kernel=4, expand=2, chunk_size=8,
        n_routed_experts=6, n_shared_experts=1, moe_intermediate_size=20, moe_shared_expert_intermediate_size=28,
        num_experts_per_tok=2, routed_scaling_factor=1.7, n_group=2, topk_group=1, norm_topk_prob=True, time_step_min=1e-4,
        layer_norm_epsilon=EPS, **more, **SIZES,
    )
    experts: dict[str, Any] = {
        "type": "moe", "scores": "sigmoid", "selection_bias": "fixed", "group_score": "top2", "n_experts": 6, "top_k": 2,
        "n_groups": 2, "top_k_groups": 1, "routed_scale": 1.7, "d_ff": 20, "d_ff_shared": 28, "gated": False,
        "activation": "relu2",
    }
    if latent:
        experts["d_latent"] = 14
    mixer = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "n_heads": 6, "eps": EPS}
    blocks = {
        "m": {"mixer": mixer, "norm": NORM}, "a": {"mixer": {**NOPE, "head_dim": 12}, "norm": NORM},
        "f": {"channel_mixer": {"type": "mlp", "d_ff": 40, "activation": "relu2"}, "norm": NORM},
        "e": {"channel_mixer": experts, "norm": NORM},
    }
    ours = {"pattern": "m f a e m e", "blocks": blocks, "final_norm": NORM}
    return Case("NemotronHForCausalLM", config, ours, ONE_BRANCH_RULES)
