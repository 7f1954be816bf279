"""Of published files: what transformers takes for settings that they leave out, where a family's reader does not say it
itself, and settings of theirs from which it computes nothing.

A key that is null is not left out. Sizes of a model stand here only where a family has always had them: a file without
``hidden_size`` is refused.
"""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"max_position_embeddings": 16384},
    "axk2": {"max_position_embeddings": 131072, "num_key_value_heads": 32},
    "bailing_hybrid": {"num_key_value_heads": 32},
    "bamba": {"max_position_embeddings": 262144, "num_key_value_heads": 8},
    "cohere": {"max_position_embeddings": 8192},
    "cohere2": {"max_position_embeddings": 8192},
    "deepseek_v2": {"q_lora_rank": 1536},
    "deepseek_v3": {
        "max_position_embeddings": 4096, "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
    },
    "deepseek_v32": {"max_position_embeddings": 163840, "num_key_value_heads": 128},
    "deepseek_v4": {"max_position_embeddings": 1048576},
    "dory": {"max_position_embeddings": 8192},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096},
    "falcon_h1": {"max_position_embeddings": 8192, "num_key_value_heads": 8, "projectors_bias": False},
    "flint": {"intermediate_size": 6144, "max_position_embeddings": 262144},
    "gemma": {"max_position_embeddings": 8192, "num_key_value_heads": 16},
    "gemma2": {"max_position_embeddings": 8192, "num_key_value_heads": 4},
    "gemma3_text": {
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
    },
    "gemma3n_text": {"max_position_embeddings": 32768},
    "gemma4_text": {"max_position_embeddings": 131072},
    "glm4": {"head_dim": 128, "max_position_embeddings": 131072, "num_key_value_heads": 2},
    "glm_moe_dsa": {"max_position_embeddings": 202752, "num_key_value_heads": 64},
    "gpt2": {"n_positions": 1024},
    "gpt_oss": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "hy_v4": {"max_position_embeddings": 262144, "routed_scaling_factor": 2.827},
    "inkling2_loop_text": {
        "log_scaling_n_floor": 8192, "max_position_embeddings": 1048576, "moe_intermediate_size": 1152, "n_routed_experts": 128,
        "num_attention_heads": 24, "swa_num_attention_heads": 24, "unpadded_vocab_size": 200058,
    },
    "inkling2_text": {"max_position_embeddings": 1048576, "unpadded_vocab_size": 200058},
    "inkling_text": {"max_position_embeddings": 131072},
    "jamba": {"max_position_embeddings": 262144, "num_key_value_heads": 8},
    "kimi_linear": {"num_key_value_heads": 32},
    "laguna": {"intermediate_size": 8192, "max_position_embeddings": 131072},
    "lara_mini": {"max_position_embeddings": 131072},
    "lfm2": {"max_position_embeddings": 128000, "num_key_value_heads": 8},
    "lfm2_moe": {"max_position_embeddings": 128000, "num_key_value_heads": 8},
    "lfm3": {"max_position_embeddings": 128000, "num_key_value_heads": 4},
    "llama4_text": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "longcat_flash": {"max_position_embeddings": 131072},
    "mimo_v2_flash": {"intermediate_size": 16384, "max_position_embeddings": 131072},
    "minicpm3": {
        "dim_model_base": 256, "kv_lora_rank": 256, "max_position_embeddings": 32768, "num_key_value_heads": 40,
        "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_depth": 1.4,
    },
    "minimax": {"max_position_embeddings": 131072},
    "minimax_m3_vl_text": {"max_position_embeddings": 524288, "num_key_value_heads": 4},
    "ministral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "modernbert-decoder": {"max_position_embeddings": 8192},
    "nanochat": {"final_logit_softcapping": 15.0},
    "nemotron_h": {"max_position_embeddings": 4096, "num_key_value_heads": 8},
    "olmo_hybrid": {"max_position_embeddings": 65536},
    "olmoe": {"max_position_embeddings": 4096},
    "phi3": {"max_position_embeddings": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3_5_moe_text": {"max_position_embeddings": 32768},
    "qwen3_5_text": {"max_position_embeddings": 32768},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    "qwen3_next": {"max_position_embeddings": 32768},
    "qwen4_exp_text": {"max_position_embeddings": 32768},
    "smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4},
    "stablelm": {"max_position_embeddings": 4096, "num_key_value_heads": 32},
    "starcoder2": {"max_position_embeddings": 4096, "num_key_value_heads": 2},
    "zamba": {"max_position_embeddings": 4096, "num_key_value_heads": 16},
    "zamba2": {"max_position_embeddings": 4096},
    "zaya": {"max_position_embeddings": 131072},
}
"""By ``model_type``."""

ANYTHING: tuple[Any, ...] = ()

ANYWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "bad_words_ids", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
        "length_penalty", "max_length", "min_length", "model_max_length", "name_or_path", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
        "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "unk_token_id",
        "use_bfloat16",
    ), ANYTHING),
    "add_cross_attention": (False,), "cross_attention_hidden_size": (None,), "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
}
"""How tokens are drawn, which older versions wrote into every file, and what no decoder has."""

FURTHER: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), ANYTHING
)
QWEN3_5: dict[str, tuple[Any, ...]] = {**FURTHER, "attn_output_gate": (True,), "mlp_only_layers": ([],)}

UNUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "bamba": {"attn_rotary_emb": ANYTHING},
    "deepseek_v4": {"topk_method": ("noaux_tc",)},
    "diffllama": {"mlp_bias": (False,), "num_diff_heads": ANYTHING},
    "exaone4": {"reorder_and_upcast_attn": ANYTHING},
    "falcon_h1": {"time_step_rank": ANYTHING},
    "gemma2": {"sliding_window_size": ANYTHING},
    "gemma3n_text": {"altup_lr_multiplier": ANYTHING, "query_pre_attn_scalar": (256,)},
    "glm_moe_dsa": {"indexer_rope_interleave": (True,), "rope_interleave": (True,)},
    "jamba": {"calc_logits_for_entire_prompt": ANYTHING, "n_ctx": ANYTHING},
    "laguna": {"use_bidirectional_attention": (False,)},
    "llama": {"is_llama_config": ANYTHING, "max_sequence_length": ANYTHING, "rope_interleaved": (False,)},
    "mamba": {
        "d_inner": ANYTHING, "d_model": ANYTHING, "fused_add_norm": ANYTHING, "n_layer": ANYTHING,
        "pad_vocab_size_multiple": ANYTHING, "rms_norm": (True,), "ssm_cfg": ({},),
    },
    "mamba2": {"intermediate_size": ANYTHING, "norm_before_gate": ANYTHING},
    "mimo_v2_flash": {"attention_chunk_size": ANYTHING, "hybrid_block_size": ANYTHING},
    "minimax_m3_vl": {
        "img_token_compression_config": ANYTHING, "num_reward_heads": (0,), "process_image_mode": ANYTHING,
    },
    "minimax_m3_vl_text": {
        "attention_output_gate": (False,), "n_shared_experts": (1,), "num_mtp_modules": ANYTHING,
        "num_nextn_predict_layers": ANYTHING, "qk_norm_type": ("per_head",), "scoring_func": ("sigmoid",),
        "use_gemma_norm": (True,), "use_qk_norm": (True,), "use_routing_bias": (True,),
    },
    "nemotron_h": {"time_step_rank": ANYTHING},
    "opt": {"activation_dropout": ANYTHING},
    "phi3": {
        "attention_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,),
        "mlp_bias": (False,),
    },
    "qwen2": {"dual_chunk_attention_config": ANYTHING, "use_mrope": (False,)},
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen4_exp_text": {**FURTHER, "mtp": ANYTHING},
    "stablelm": {
        "norm_eps": ANYTHING, "num_heads": ANYTHING, "rope_pct": (0.25,), "rotary_scaling_factor": (1.0,),
    },
    "starcoder2": {
        "attention_softmax_in_fp32": ANYTHING, "layer_norm_epsilon": ANYTHING, "scale_attention_softmax_in_fp32": ANYTHING,
        "scale_attn_weights": (True,),
    },
    "xlstm": {
        "add_embedding_dropout": ANYTHING, "add_forward_backend_padding": ANYTHING, "add_post_blocks_norm": (True,),
        "add_post_norm": (False,), "add_qk_norm": (False,), "cell_norm_eps": (1e-6,), "force_bos_token_insert": ANYTHING,
        "head_dim": ANYTHING, "igate_bias_init_range": ANYTHING, "lm_head_weight_dtype": ANYTHING,
        "mlstm_round_up_to_multiple_of": (64,),
    },
    "zamba": {"use_conv_bias": (True,)},
}
"""By ``model_type``: settings that published files have and their classes in transformers do not, with the values they may
have where another would be of another model."""
