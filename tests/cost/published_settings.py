"""config.json of each recipe of ``recipes/published`` that transformers can build, where it departs from its family's default.

Empty ones are that default. The others are published settings, from the files that the recipes name.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Entry: TypeAlias = tuple[str, dict[str, Any]]
"""A ``model_type`` and settings of it."""

LINEAR, FULL, SLIDING, CONV = "linear_attention", "full_attention", "sliding_attention", "conv"
LAYER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""NVIDIA's letters."""

ALPHA = 3.5565588200778455
"""Of MiniMax-Text-01: (2 x 80) ^ 0.25."""


def rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def llama3(theta: float, factor: float) -> dict[str, Any]:
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return rope(theta, "llama3", factor=factor, **frequencies)


def at(places: tuple[int, ...], n: int, kind: str, other: str) -> list[str]:
    """``kind`` at these layers, counted from 0, and ``other`` elsewhere."""
    return [kind if i in places else other for i in range(n)]


def nemotron(pattern: str, d_model: int, n_heads: int, mamba_heads: int, **more: Any) -> Entry:
    """The settings that all Nemotron-H have."""
    same = {
        "layers_block_type": [LAYER[letter] for letter in pattern], "hidden_size": d_model, "num_attention_heads": n_heads,
        "mamba_num_heads": mamba_heads, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return "nemotron_h", {**same, **more}


def experts(n: int, top_k: int, d_ff: int, scale: float, **more: Any) -> dict[str, Any]:
    """Those of Nemotron 3, each with a shared one of twice the width."""
    return {
        "n_routed_experts": n, "num_experts_per_tok": top_k, "moe_intermediate_size": d_ff, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 2 * d_ff, "routed_scaling_factor": scale, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "num_key_value_heads": 2, "intermediate_size": d_ff, "max_position_embeddings": 262144, **more,
    }


def granite_4_h(d_model: int, n_heads: int, n: int, top_k: int, d_ff: int, shared: int, logits: int) -> Entry:
    return "granitemoehybrid", {
        "vocab_size": 100352, "hidden_size": d_model, "num_hidden_layers": 40, "num_attention_heads": n_heads,
        "num_key_value_heads": {32: 8, 12: 4}[n_heads], "num_local_experts": n, "num_experts_per_tok": top_k,
        "intermediate_size": d_ff, "shared_intermediate_size": shared, "mamba_d_state": 128, "mamba_n_heads": d_model // 32,
        "mamba_d_head": 64, "mamba_n_groups": 1, "tie_word_embeddings": True, "position_embedding_type": "nope",
        "layer_types": at((5, 15, 25, 35), 40, FULL, LINEAR), "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "residual_multiplier": 0.22, "logits_scaling": logits, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    }


def qwen3_5(kind: str, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, v_heads: int, **more: Any) -> Entry:
    return kind, {
        "hidden_size": d_model, "num_hidden_layers": n_layers, "num_attention_heads": n_heads, "head_dim": 256,
        "num_key_value_heads": n_kv_heads, "linear_num_key_heads": 16, "linear_num_value_heads": v_heads,
        "max_position_embeddings": 262144, "rope_parameters": rope(1e7, partial_rotary_factor=0.25), **more,
    }


def lfm2(n_layers: int, full: tuple[int, ...], d_ff: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 2048, "num_hidden_layers": n_layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": d_ff, "layer_types": at(full, n_layers, FULL, CONV), **more,
    }


def griffin(kinds: list[str]) -> Entry:
    """The paper's 7B models."""
    return "recurrent_gemma", {
        "hidden_size": 4096, "intermediate_size": 24576, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 1, "lru_width": 5632, "head_dim": 128, "attention_window_size": 1024, "block_types": kinds,
        "embeddings_scale_by_sqrt_dim": False,
    }


NEMOTRON = {
    "h_8b": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "h_47b": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
    "h_56b": "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
    "nano_9b_v2": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "3_nano": "MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "3_super": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "3_ultra": "MEMEMEM*EMEMEM*" + 3 * "EMEMEMEM*EMEMEMEM*EMEMEM*" + "EMEMEMEM*EMEMEMEME",
}
"""As NVIDIA writes them: M Mamba-2, * attention, - squared ReLU, E experts."""

SETTINGS: dict[str, Entry] = {
    # Hybrids of attention and a recurrence
    "jamba": ("jamba", {}),
    "jamba_1_5_large": ("jamba", {
        "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 72, "num_attention_heads": 64,
        "num_key_value_heads": 8, "mamba_dt_rank": 512,
    }),
    "zamba": ("zamba", {}),
    "zamba2": ("zamba2", {}),
    "zamba2_7b": ("zamba2", {
        "hidden_size": 3584, "num_hidden_layers": 81, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 32, "attention_head_dim": 224, "num_mem_blocks": 2, "adapter_rank": 128, "use_mem_rope": True,
        "use_shared_attention_adapter": False, "mamba_headdim": 64, "n_mamba_heads": 112, "mamba_ngroups": 2,
        "mamba_d_state": 64, "layers_block_type": at((6, *range(11, 78, 6)), 81, "hybrid", "mamba"),
    }),
    "bamba": ("bamba", {
        "vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128, "partial_rotary_factor": 0.5,
    }),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1_0_5b": ("falcon_h1", {
        "vocab_size": 32784, "hidden_size": 1024, "num_hidden_layers": 36, "intermediate_size": 2048,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_parameters": rope(1e11),
        "max_position_embeddings": 16384, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_rms_norm": False, "mamba_norm_before_gate": False, "embedding_multiplier": 32**0.5,
        "lm_head_multiplier": 0.0390625, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "key_multiplier": 0.39062499999999994, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
    }),
    "granite_4_h_small": granite_4_h(4096, 32, 72, 10, 768, 1536, 16),
    "granite_4_h_tiny": granite_4_h(1536, 12, 64, 6, 512, 1024, 6),
    "nemotron_h_8b": nemotron(NEMOTRON["h_8b"], 4096, 32, 128, intermediate_size=21504),
    "nemotron_h_47b": nemotron(NEMOTRON["h_47b"], 8192, 64, 256, intermediate_size=30720, ssm_state_size=256),
    "nemotron_h_56b": nemotron(NEMOTRON["h_56b"], 8192, 64, 256, intermediate_size=32768, ssm_state_size=256),
    "nemotron_nano_9b_v2": nemotron(
        NEMOTRON["nano_9b_v2"], 4480, 40, 128, intermediate_size=15680, mamba_head_dim=80, max_position_embeddings=131072
    ),
    "nemotron_3_nano": nemotron(NEMOTRON["3_nano"], 2688, 32, 64, **experts(128, 6, 1856, 2.5)),
    "nemotron_3_super": nemotron(NEMOTRON["3_super"], 4096, 32, 128, **experts(512, 22, 2688, 5.0, moe_latent_size=1024)),
    "nemotron_3_ultra": nemotron(NEMOTRON["3_ultra"], 8192, 64, 256, **experts(512, 22, 5120, 5.0, moe_latent_size=2048)),
    "minimax_text_01": ("minimax", {
        "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
        "layer_types": at(tuple(range(7, 80, 8)), 80, FULL, LINEAR), "rms_norm_eps": 1e-5, "rope_parameters": rope(1e7),
        "max_position_embeddings": 10240000, "full_attn_alpha_factor": ALPHA, "linear_attn_alpha_factor": ALPHA,
        "mlp_alpha_factor": ALPHA,
    }),
    "kimi_linear": ("kimi_linear", {"layer_types": at((3, 7, 11, 15, 19, 23, 26), 27, FULL, LINEAR)}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_27b": qwen3_5("qwen3_5_text", 5120, 64, 24, 4, 48, intermediate_size=17408),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_5_397b_a17b": qwen3_5(
        "qwen3_5_moe_text", 4096, 60, 32, 2, 64, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "glm5_next": ("glm5_next", {}),
    "lara_mini": ("lara_mini", {}),
    "lfm2": ("lfm2", lfm2(16, (2, 5, 8, 10, 12, 14), 12288)),
    "lfm2_2_6b": ("lfm2", lfm2(30, (2, 5, 9, 13, 17, 21, 24, 27), 10752, block_auto_adjust_ff_dim=False)),
    "lfm2_8b_a1b": ("lfm2_moe", lfm2(
        24, (2, 6, 10, 14, 18, 21), 7168, num_dense_layers=2, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        moe_intermediate_size=1792, use_expert_bias=True, routed_scaling_factor=1.0,
    )),
    "lfm3": ("lfm3", {}),
    "recurrent_gemma": ("recurrent_gemma", {"num_key_value_heads": 1, "intermediate_size": 15360}),
    "recurrent_gemma_9b": ("recurrent_gemma", {
        "hidden_size": 4096, "intermediate_size": 24576, "num_hidden_layers": 38, "num_attention_heads": 16,
        "num_key_value_heads": 1, "lru_width": 4096, "head_dim": 256,
    }),
    "griffin_7b": griffin(["recurrent", "recurrent", "attention"]),
    "hawk_7b": griffin(["recurrent"]),
    # Convolutions beside attention
    "inkling": ("inkling_text", {}),
    "inkling2": ("inkling2_text", {"unpadded_vocab_size": 201024}),
    "inkling2_loop": ("inkling2_loop_text", {"unpadded_vocab_size": 201024}),
    # Recurrences alone
    "mamba_2_8b": ("mamba", {
        "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280, "intermediate_size": 5120, "time_step_rank": 160,
    }),
    "falcon_mamba_7b": ("falcon_mamba", {
        "vocab_size": 65024, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64, "time_step_rank": 256,
        "tie_word_embeddings": False,
    }),
    "mamba2": ("mamba2", {}),
    "mamba2_2_7b": ("mamba2", {
        "vocab_size": 50288, "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "tie_word_embeddings": True,
    }),
    "rwkv4": ("rwkv", {"rescale_every": 0}),
    "xlstm": ("xlstm", {}),
    # Attention to near and to far tokens in turn
    "gemma2": ("gemma2", {}),
    "gemma2_9b": ("gemma2", {
        "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 14336,
    }),
    "gemma3_4b": ("gemma3_text", {
        "vocab_size": 262208, "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 10240, "sliding_window": 1024,
        "rope_parameters": {FULL: rope(1e6, "linear", factor=8.0), SLIDING: rope(1e4)},
    }),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss_20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "command_r7b": ("cohere2", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "logit_scale": 0.25, "rope_parameters": rope(5e4),
        "max_position_embeddings": 132096,
    }),
    "olmo3": ("olmo3", {}),
    "exaone4_32b": ("exaone4", {
        "vocab_size": 102400, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27392, "sliding_window": 4096, "rope_parameters": llama3(1e6, 16.0),
        "layer_types": at(tuple(range(3, 64, 4)), 64, FULL, SLIDING), "max_position_embeddings": 131072,
    }),
    "trinity_mini": ("afmoe", {
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_dense_layers": 2, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1, "route_scale": 2.826,
        "sliding_window": 2048, "mup_enabled": True, "max_position_embeddings": 131072,
        "layer_types": at(tuple(range(3, 32, 4)), 32, FULL, SLIDING),
    }),
    "granitemoe_swa": ("granitemoe_swa", {}),
    "mimo_v2_flash": ("mimo_v2_flash", {}),
    "llama4": ("llama4_text", {}),
    "flint": ("flint", {}),
    "gpt_neo": ("gpt_neo", {}),
    "modernbert_decoder": ("modernbert-decoder", {}),
    # Attention through a latent, or to the tokens that an indexer chooses
    "deepseek_v2_lite": ("deepseek_v2", {
        "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "moe_intermediate_size": 1408, "intermediate_size": 10944, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 163840, "rope_parameters": rope(
            1e4, "yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707,
            original_max_position_embeddings=4096,
        ),
    }),
    "deepseek_v3": ("deepseek_v3", {}),
    "minicpm3": ("minicpm3", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "hy_v4": ("hy_v4", {}),
    "axk2": ("axk2", {}),
    # Attention with experts
    "mixtral": ("mixtral", {}),
    "olmoe_1b_7b": ("olmoe", {"intermediate_size": 1024, "num_experts_per_tok": 8, "num_experts": 64}),
    "qwen3_30b_a3b": ("qwen3_moe", {
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "rope_parameters": rope(1e6),
        "max_position_embeddings": 40960,
    }),
    "laguna": ("laguna", {}),
    # Attention alone
    "gpt2": ("gpt2", {}),
    "gptj": ("gptj", {}),
    "gpt_neox": ("gpt_neox", {}),
    "pythia_2_8b": ("gpt_neox", {
        "vocab_size": 50304, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 10240,
    }),
    "opt_6_7b": ("opt", {
        "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32, "word_embed_proj_dim": 4096,
    }),
    "bloom_176b": ("bloom", {"hidden_size": 14336, "n_layer": 70, "n_head": 112}),
    "falcon": ("falcon", {}),
    "mpt_7b": ("mpt", {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432}),
    "llama": ("llama", {}),
    "llama_3_1_8b": ("llama", {
        "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_parameters": llama3(5e5, 8.0),
    }),
    "mistral": ("mistral", {}),
    "gemma": ("gemma", {}),
    "olmo": ("olmo", {}),
    "olmo2_7b": ("olmo2", {
        "vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_parameters": rope(5e5),
    }),
    "qwen2_7b": ("qwen2", {
        "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "rope_parameters": rope(1e6),
        "max_position_embeddings": 131072,
    }),
    "qwen3_8b": ("qwen3", {
        "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "rope_parameters": rope(1e6),
    }),
    "granite_4_1_8b": ("granite", {
        "vocab_size": 100352, "num_hidden_layers": 40, "num_key_value_heads": 8, "intermediate_size": 12800,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "max_position_embeddings": 131072, "rope_parameters": rope(1e7),
    }),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "smollm3": ("smollm3", {}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {}),
    "hunyuan_7b": ("hunyuan_v1_dense", {
        "vocab_size": 128167, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": True, "max_position_embeddings": 32768,
        "rope_parameters": rope(1e4, "dynamic", alpha=1000.0, factor=1.0),
    }),
    "diffllama": ("diffllama", {}),
    # Latents, streams and shared keys and values
    "deepseek_v4": ("deepseek_v4", {}),
    "gemma3n": ("gemma3n_text", {}),
    "gemma4": ("gemma4_text", {}),
    "longcat_flash": ("longcat_flash", {}),
    "minimax_m3": ("minimax_m3_vl_text", {
        "layer_types": at((0, 1, 2), 60, FULL, "minimax_m3_sparse"), "mlp_layer_types": at((0, 1, 2), 60, "dense", "sparse"),
        "rope_parameters": rope(5e6, partial_rotary_factor=0.5), "max_position_embeddings": 1048576,
    }),
    "qwen3_8_flash_next": ("qwen4_exp_text", {
        "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
        "vocab_size": 248320, "max_position_embeddings": 262144, "output_gate_type": "sigmoid", "eos_token_id": 248044,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 2560, "split_ngram_parts": 128,
        "rope_parameters": rope(1e7, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[11, 11, 10]),
    }),
    "zaya": ("zaya", {}),
}
