"""More stacks of rotary attention: StableLM, Granite, Cohere, GLM-4, Hunyuan, nanochat, DiffLlama."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, link, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def _gated(settings: Settings) -> Table:
    return parts.gated(settings, settings.count("intermediate_size"), bias=settings.flag("mlp_bias", False))


def _layer_norms(config: LanguageModelConfig) -> Table:
    """:func:`settings_of` of a model with layer norms."""
    found = settings_of(config)
    return {"layer_norm_eps": found.pop("rms_norm_eps"), **found}


# -- StableLM ----------------------------------------------------------------------------------------------------------


def _stablelm(settings: Settings) -> Table:
    norm: Table = {"type": "layer_norm", "eps": settings.number("layer_norm_eps", 1e-5)}
    settings.passed_over("hidden_dropout")
    attention: Table = {**heads(settings), "position": rope(settings, fraction=0.25)}
    if settings.flag("use_qkv_bias", False):
        attention["qkv_bias"] = True
    if settings.flag("qk_layernorm", False):
        attention |= {"qk_norm": {**norm, "bias": False}, "qk_norm_over": "each_head"}
    channel = parts.gated(settings, settings.count("intermediate_size"))
    block: Table = {"mixer": attention, "channel_mixer": channel, "norm": norm}
    if settings.flag("use_parallel_residual", False):
        block |= {"type": "parallel", "shared_norm": True}
    return parts.alike(settings, block, norm)


def _link_stablelm(links: WeightMap, config: LanguageModelConfig) -> None:
    link(links, config, attention={"q_norm": None, "k_norm": None})
    for block, ours, theirs in parts.each_layer(links, config, {}):
        mixer = block.mixer
        width = mixer.head_dim or config.d_model // mixer.n_heads
        for role, n in (("q", mixer.n_heads), ("k", mixer.n_kv_heads)):
            heads_of = [f"{theirs}.self_attn.{role}_layernorm.norms.{head}" for head in range(n)]
            links.joined(f"{ours}.mixer.{role}_norm", heads_of, [width] * n)


def _stablelm_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    found = _layer_norms(config)
    return {
        **found, "use_qkv_bias": block.mixer.qkv_bias, "qk_layernorm": block.mixer.qk_norm is not None,
        "use_parallel_residual": block.type == "parallel",
        "rope_parameters": {"partial_rotary_factor": 1.0, **found["rope_parameters"]},
    }


# -- Granite -----------------------------------------------------------------------------------------------------------


def _granite(settings: Settings) -> Table:
    norm, scale = parts.norm(settings), settings.number("attention_multiplier", 1.0)
    block = {
        "mixer": {**heads(settings), **parts.biased(settings), "position": rope(settings), "scale": scale},
        "channel_mixer": _gated(settings), "norm": norm, "residual_scale": settings.number("residual_multiplier", 1.0),
    }
    table = parts.alike(settings, block, norm)
    table["head"]["scale"] = 1 / settings.number("logits_scaling", 1.0)
    return {**table, "stem": {"type": "token_embedding", "scale": settings.number("embedding_multiplier", 1.0)}}


def _granite_settings(config: LanguageModelConfig) -> Table:
    block, stem, head = parts.first_block(config), config.stem, config.head
    return {
        **settings_of(config), "attention_bias": block.mixer.qkv_bias, "mlp_bias": block.channel_mixer.bias,
        "attention_multiplier": block.mixer.scale, "residual_multiplier": block.residual_scale,
        "embedding_multiplier": getattr(stem, "scale", 1.0), "logits_scaling": _inverse(getattr(head, "scale", 1.0)),
    }


def _inverse(number: float) -> float:
    """A number whose inverse is this one, to the last bit where there is such."""
    near = 1 / number
    tried = (round(near, 9), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((one for one in tried if one and 1 / one == number), near)


# -- Cohere ------------------------------------------------------------------------------------------------------------


def _cohere(settings: Settings) -> Table:
    norm: Table = {"type": "layer_norm", "eps": settings.number("layer_norm_eps", 1e-5), "bias": False}
    position = {**rope(settings, theta=500000.0), "interleaved": True}
    attention = {**heads(settings), **parts.biased(settings), "position": position}
    if settings.flag("use_qk_norm", False):
        attention |= {"qk_norm": norm, "qk_norm_over": "each_head"}
    block = {
        "type": "parallel", "shared_norm": True, "mixer": attention, "norm": norm,
        "channel_mixer": parts.gated(settings, settings.count("intermediate_size")),
    }
    table = parts.alike(settings, block, norm, tied=True)
    table["head"]["scale"] = settings.number("logit_scale", 0.0625)
    return table


def _link_cohere(links: WeightMap, config: LanguageModelConfig) -> None:
    link(links, config, attention={"q_norm": None, "k_norm": None})
    for block, ours, theirs in parts.each_layer(links, config, {}):
        for role, n in (("q", block.mixer.n_heads), ("k", block.mixer.n_kv_heads)):
            norm, there = f"{ours}.mixer.{role}_norm.weight", f"{theirs}.self_attn.{role}_norm.weight"
            if links.has(norm):
                links.turned(norm, there, Tensor.flatten, lambda x, n=n: x.unflatten(0, (n, -1)))  # type: ignore[misc]


def _cohere_settings(config: LanguageModelConfig) -> Table:
    mixer = parts.first_block(config).mixer
    return {
        **_layer_norms(config), "attention_bias": mixer.qkv_bias, "use_qk_norm": mixer.qk_norm is not None,
        "logit_scale": getattr(config.head, "scale", 1.0),
    }


# -- GLM-4 -------------------------------------------------------------------------------------------------------------


def _glm4(settings: Settings) -> Table:
    norm = parts.norm(settings, default=1.5625e-7)
    attention = {**heads(settings), "position": {**rope(settings, fraction=0.5), "interleaved": True}}
    if settings.flag("attention_bias", True):
        attention["qkv_bias"] = True
    channel = parts.gated(settings, settings.count("intermediate_size"))
    return parts.alike(settings, {"type": "sandwich", "mixer": attention, "channel_mixer": channel, "norm": norm}, norm)


def _link_glm4(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    norms = {
        "mixer_norm": "input_layernorm", "mixer_post_norm": "post_self_attn_layernorm",
        "channel_norm": "post_attention_layernorm", "channel_post_norm": "post_mlp_layernorm",
    }
    for _, ours, theirs in parts.each_layer(links, config, norms):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
        parts.link_fused_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


def _glm4_settings(config: LanguageModelConfig) -> Table:
    found = settings_of(config)
    return {
        **found, "attention_bias": parts.first_block(config).mixer.qkv_bias,
        "pad_token_id": None,  # transformers would take 151329, whatever the size of the vocabulary
        "rope_parameters": {"partial_rotary_factor": 1.0, **found["rope_parameters"]},
    }


# -- Hunyuan -----------------------------------------------------------------------------------------------------------

HUNYUAN = (
    "add_classification_head", "cla_share_factor", "class_num", "dense_list", "eod_id", "eod_token_id", "im_end_id",
    "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "sep_token_id", "text_end_id",
    "text_start_id",
)
"""Ids of special tokens, a head that classifies, and options of parts that the dense models do not have."""


def _hunyuan(settings: Settings) -> Table:
    settings.passed_over(*HUNYUAN)
    settings.only("use_cla", False)
    settings.only("use_qk_norm", True)
    settings.only("norm_type", "rms")
    attention, norm = heads(settings), parts.norm(settings, default=1e-5)
    settings.only("attention_head_dim", attention.get("head_dim", settings.count("hidden_size") // attention["n_heads"]))
    attention |= {**parts.biased(settings), "position": _hunyuan_rope(settings), "qk_norm": norm, "qk_norm_after": True}
    settings.only("mlp_bias", False)
    channel = parts.gated(settings, settings.count("intermediate_size"))
    return parts.alike(settings, {"mixer": attention, "channel_mixer": channel, "norm": norm}, norm)


def _hunyuan_rope(settings: Settings) -> Table:
    """``dynamic`` with an ``alpha`` stretches the base by it, whatever the length."""
    found = settings.take("rope_parameters", settings.take("rope_scaling", {}, kind=dict), kind=dict)
    if found.get("rope_type", found.get("type")) != "dynamic" or not found.get("alpha"):
        return rope(settings)
    inner = settings.inner("rope_parameters" if "rope_parameters" in settings else "rope_scaling")
    inner.passed_over("rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    settings.passed_over("max_position_embeddings")
    theta = inner.number("rope_theta", settings.number("rope_theta", 10000.0))
    return {"type": "rope", "theta": theta, "scaling": {"type": "ntk", "factor": inner.number("alpha")}}


def _hunyuan_settings(config: LanguageModelConfig) -> Table:
    mixer = parts.first_block(config).mixer
    found = {**settings_of(config), "attention_bias": mixer.qkv_bias}
    if found["rope_parameters"]["rope_type"] == "ntk":
        alpha = found["rope_parameters"]["factor"]
        found["rope_parameters"] |= {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
    return found


# -- nanochat ----------------------------------------------------------------------------------------------------------


def _nanochat(settings: Settings) -> Table:
    norm: Table = {**parts.norm(settings), "weight": False}
    position, cap = rope(settings), settings.number("final_logit_softcapping", None)
    if "fraction" in position:
        raise CheckpointError(f"{settings.where}: partial_rotary_factor: nanochat turns whole heads")
    attention = {**heads(settings), **parts.biased(settings), "position": position, "qk_norm": norm, "qk_norm_after": True}
    act = parts.activation(settings, default="relu2")
    channel = {"type": "mlp", "d_ff": settings.count("intermediate_size"), "activation": act}
    table = parts.alike(settings, {"mixer": attention, "channel_mixer": channel, "norm": norm}, norm)
    if cap is not None:
        table["head"]["softcap"] = cap
    return {**table, "stem": {"type": "token_embedding", "norm": norm}}


def _link_nanochat(links: WeightMap, config: LanguageModelConfig) -> None:
    """Its rotations go the other way round: the halves of each head of queries and keys change places."""
    parts.link_ends(links, config)
    mixer = parts.first_block(config).mixer
    width = mixer.head_dim or config.d_model // mixer.n_heads

    def swap(x: Tensor) -> Tensor:
        halves: Tensor = x.unflatten(0, (-1, 2, width // 2))
        return halves.flip(1).flatten(0, 2)

    for _, ours, theirs in parts.each_layer(links, config, {
        "mixer.v_proj": "self_attn.v_proj", "mixer.out_proj": "self_attn.o_proj", "channel_mixer.up_proj": "mlp.fc1",
        "channel_mixer.down_proj": "mlp.fc2",
    }):
        for role in "qk":
            for rest in ("weight", "bias"):
                if links.has(f"{ours}.mixer.{role}_proj.{rest}"):
                    links.turned(f"{ours}.mixer.{role}_proj.{rest}", f"{theirs}.self_attn.{role}_proj.{rest}", swap, swap)


def _nanochat_settings(config: LanguageModelConfig) -> Table:
    return {
        **settings_of(config), "attention_bias": parts.first_block(config).mixer.qkv_bias,
        "final_logit_softcapping": getattr(config.head, "softcap", None),
    }


# -- DiffLlama ---------------------------------------------------------------------------------------------------------


def _diffllama(settings: Settings) -> Table:
    settings.only("attention_bias", False)
    settings.passed_over("lambda_std_dev")
    norm, n_heads = parts.norm(settings, default=1e-5), settings.count("num_attention_heads")
    n_kv_heads = settings.count("num_key_value_heads", n_heads)
    if n_heads % 2 or n_kv_heads % 2:
        raise CheckpointError(f"{settings.where}: {n_heads} heads with {n_kv_heads} of keys are no pairs")
    attention: Table = {
        "type": "differential_attention", "n_heads": n_heads // 2, "n_kv_heads": n_kv_heads // 2,
        "head_dim": settings.count("head_dim", settings.count("hidden_size") // n_heads), "position": rope(settings),
        "norm": {"type": "rms_norm", "eps": norm["eps"], "weight": False},
    }
    channel = parts.gated(settings, settings.count("intermediate_size"))
    return parts.alike(settings, {"mixer": attention, "channel_mixer": channel, "norm": norm}, norm)


def _link_diffllama(links: WeightMap, config: LanguageModelConfig) -> None:
    """A wide value of ours is one value head of the first half and one of the second."""
    link(links, config, attention={"v_proj": None})
    mixer = parts.first_block(config).mixer
    n = mixer.n_kv_heads
    for _, ours, theirs in parts.each_layer(links, config, {}):
        links.turned(
            f"{ours}.mixer.v_proj.weight", f"{theirs}.self_attn.v_proj.weight",
            lambda x: x.unflatten(0, (2, n, -1)).transpose(0, 1).flatten(0, 2),
            lambda x: x.unflatten(0, (n, 2, -1)).transpose(0, 1).flatten(0, 2),
        )
        links.named(f"{ours}.mixer", f"{theirs}.self_attn", ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))


def _diffllama_settings(config: LanguageModelConfig) -> Table:
    mixer = parts.first_block(config).mixer
    found = settings_of(config)
    pairs = {"num_attention_heads": 2 * mixer.n_heads, "num_key_value_heads": 2 * (mixer.n_kv_heads or mixer.n_heads)}
    return {**found, **pairs, "head_dim": mixer.head_dim or config.d_model // pairs["num_attention_heads"]}


FAMILIES = (
    Family("stablelm", "StableLmForCausalLM", _stablelm, _link_stablelm, _stablelm_settings),
    Family("granite", "GraniteForCausalLM", _granite, link, _granite_settings),
    Family("cohere", "CohereForCausalLM", _cohere, _link_cohere, _cohere_settings),
    Family("glm4", "Glm4ForCausalLM", _glm4, _link_glm4, _glm4_settings),
    Family(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _hunyuan,
        partial(link, attention={"q_norm": "query_layernorm", "k_norm": "key_layernorm"}), _hunyuan_settings,
    ),
    Family("nanochat", "NanoChatForCausalLM", _nanochat, _link_nanochat, _nanochat_settings),
    Family("diffllama", "DiffLlamaForCausalLM", _diffllama, _link_diffllama, _diffllama_settings),
)
