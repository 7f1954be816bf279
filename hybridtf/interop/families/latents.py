"""Pre-norm stacks of multi-head latent attention: DeepSeek-V2 and V3, MiniCPM3."""

from __future__ import annotations

from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def latent(settings: Settings, *, interleaved: bool, v_dim: int = 128) -> Table:
    """The mixer. Norms of latents have an eps of 1e-6 whatever the settings say."""
    n_heads = settings.count("num_attention_heads")
    settings.only("num_key_value_heads", n_heads)
    settings.passed_over("head_dim", "qk_head_dim")
    position = {**rope(settings), "interleaved": True} if interleaved else rope(settings)
    rank = settings.take("q_lora_rank", None, kind=int)
    return {
        "type": "mla", "n_heads": n_heads, "kv_lora_rank": settings.count("kv_lora_rank", 512),
        "qk_nope_head_dim": settings.count("qk_nope_head_dim", 128), "qk_rope_head_dim": settings.count("qk_rope_head_dim", 64),
        "v_dim": settings.count("v_head_dim", v_dim), "bias": settings.flag("attention_bias", False), "position": position,
        **({} if rank is None else {"q_lora_rank": rank}),
    }


def _stack(settings: Settings, mixer: Table, channels: list[Table], *, tied: bool, eps: float = 1e-6, **more: Any) -> Table:
    norm = parts.norm(settings, default=eps)
    layers = [{"mixer": mixer, "channel_mixer": channel, "norm": norm, **more} for channel in channels]
    return parts.stack(settings, layers, norm, tied=tied)


def _channels(settings: Settings, first_dense: int, options: Table) -> list[Table]:
    """Dense layers, then experts."""
    settings.only("hidden_act", "silu")
    settings.only("moe_layer_freq", 1)
    settings.passed_over("ep_size", "aux_loss_alpha", "seq_aux")
    n, dense = settings.count("num_hidden_layers"), settings.take("first_k_dense_replace", first_dense, kind=int)
    d_ff = settings.count("moe_intermediate_size")
    experts = {
        "type": "moe", "n_experts": settings.count("n_routed_experts"), "top_k": settings.count("num_experts_per_tok"),
        "d_ff": d_ff, "d_ff_shared": d_ff * settings.count("n_shared_experts"),
        "routed_scale": settings.number("routed_scaling_factor", 1.0), **options,
    }
    return [parts.gated(settings, settings.count("intermediate_size")) if i < dense else experts for i in range(n)]


def _deepseek_v3(settings: Settings) -> Table:
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    settings.passed_over("num_nextn_predict_layers", "num_mtp_layers")
    options = {
        "scores": "sigmoid", "selection_bias": "balanced", "group_score": "top2", "n_groups": settings.count("n_group", 8),
        "top_k_groups": settings.count("topk_group", 4), "normalize": settings.flag("norm_topk_prob", True),
    }
    mixer = latent(settings, interleaved=settings.flag("rope_interleave", True))
    return _stack(settings, mixer, _channels(settings, 3, options), tied=False)


def _deepseek_v2(settings: Settings) -> Table:
    settings.only("scoring_func", "softmax")
    settings.only("norm_topk_prob", False)
    settings.flag("mlp_bias", False)  # which reaches no layer there
    method = settings.only("topk_method", "greedy", "group_limited_greedy")
    groups = {"n_groups": settings.count("n_group", 1), "top_k_groups": settings.count("topk_group", 1)}
    options = {"scores": "softmax", "normalize": False, **(groups if method != "greedy" else {})}
    return _stack(settings, latent(settings, interleaved=True), _channels(settings, 0, options), tied=False)


def _minicpm3(settings: Settings) -> Table:
    n, d_model = settings.count("num_hidden_layers"), settings.count("hidden_size")
    mixer = latent(settings, interleaved=False, v_dim=d_model // settings.count("num_attention_heads"))
    channel = parts.gated(settings, settings.count("intermediate_size"), bias=settings.flag("mlp_bias", False))
    scale = settings.number("scale_depth", n**0.5) / n**0.5
    table = _stack(settings, mixer, [channel] * n, tied=True, eps=1e-5, residual_scale=scale)
    base = settings.count("dim_model_base", d_model)
    stem = {"type": "token_embedding", "scale": settings.number("scale_emb", 12)}
    return {**table, "stem": stem, "head": {**table["head"], "scale": base / d_model}}


# -- weights -----------------------------------------------------------------------------------------------------------

def link_latent(links: WeightMap, ours: str, theirs: str, out: str = "o_proj") -> None:
    """A layer of latent attention; ``out``: how its last projection is called."""
    links.named(ours, theirs, {
        "q_proj": "q_proj", "q_a_proj": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b_proj": "q_b_proj",
        "kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b_proj": "kv_b_proj", "out_proj": out,
    })


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        link_latent(links, f"{ours}.mixer", f"{theirs}.self_attn")
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer)


# -- back --------------------------------------------------------------------------------------------------------------


def latent_settings(mixer: Any) -> Table:
    """The mixer as settings."""
    return {
        "num_attention_heads": mixer.n_heads, "num_key_value_heads": mixer.n_heads, "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank, "qk_nope_head_dim": mixer.qk_nope_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim, "v_head_dim": mixer.v_dim, "attention_bias": mixer.bias,
        **({} if mixer.position.type == "none" else {"rope_parameters": rope_settings(mixer.position.to_dict())}),
    }


def _experts_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    dense = [block.channel_mixer for block in blocks if not hasattr(block.channel_mixer, "n_experts")]
    moe = next(block.channel_mixer for block in blocks if hasattr(block.channel_mixer, "n_experts"))
    return {
        **parts.ends_settings(config), **latent_settings(blocks[0].mixer), "rms_norm_eps": blocks[0].norm.eps,
        "hidden_act": "silu", "intermediate_size": dense[0].d_ff if dense else moe.d_ff, "first_k_dense_replace": len(dense),
        **parts.expert_settings(moe),
    }


def _deepseek_v3_settings(config: LanguageModelConfig) -> Table:
    return {**_experts_settings(config), "rope_interleave": parts.first_block(config).mixer.position.interleaved}


def _deepseek_v2_settings(config: LanguageModelConfig) -> Table:
    found = _experts_settings(config)
    return {**found, "topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


def _minicpm3_settings(config: LanguageModelConfig) -> Table:
    block, n = parts.first_block(config), len(config.layers())
    stem, head, channel = config.stem, config.head, block.channel_mixer
    return {
        **parts.ends_settings(config), **latent_settings(block.mixer), "rms_norm_eps": block.norm.eps,
        "intermediate_size": channel.d_ff, "hidden_act": parts.activation_name(getattr(channel, "activation", "silu")),
        "mlp_bias": channel.bias, "scale_emb": parts.whole(stem.scale),  # type: ignore[attr-defined]
        "scale_depth": _near(block.residual_scale * n**0.5),
        "dim_model_base": round(head.scale * config.d_model),  # type: ignore[attr-defined]
    }


def _near(number: float) -> float:
    """Without what rounding added to it."""
    return float(f"{number:.14g}")


FAMILIES = (
    Family("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_v3, _link, _deepseek_v3_settings),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_v2, _link, _deepseek_v2_settings),
    Family("minicpm3", "MiniCPM3ForCausalLM", _minicpm3, _link, _minicpm3_settings),
)
