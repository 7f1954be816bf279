"""OLMo, OLMo 2 and OLMoE: norms without weights, norms of what branches give, norms of all heads side by side."""

from __future__ import annotations

from functools import partial

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, link, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.models import LanguageModelConfig

PLAIN: Table = {"type": "layer_norm", "eps": 1e-5, "weight": False, "bias": False}
"""OLMo's norm, which no setting changes."""


def _attention(settings: Settings, *, clips: bool = True) -> Table:
    table = {**heads(settings), "position": rope(settings)}
    clip = settings.number("clip_qkv", None) if clips else None
    table |= parts.biased(settings)
    return table if clip is None else {**table, "qkv_clip": clip}


def _olmo(settings: Settings) -> Table:
    channel = parts.gated(settings, settings.count("intermediate_size"))
    return parts.alike(settings, {"mixer": _attention(settings), "channel_mixer": channel, "norm": PLAIN}, PLAIN)


def _olmo2(settings: Settings) -> Table:
    norm = parts.norm(settings, default=1e-5)
    block = {
        "type": "output_norm", "norm": norm,
        "mixer": {**_attention(settings, clips=False), "qk_norm": norm, "qk_norm_over": "heads"},
        "channel_mixer": parts.gated(settings, settings.count("intermediate_size")),
    }
    return parts.alike(settings, block, norm)


def _olmoe(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    norm = parts.norm(settings, default=1e-5)
    experts = {
        "type": "moe", "n_experts": settings.count("num_experts", 64), "top_k": settings.count("num_experts_per_tok", 8),
        "d_ff": settings.count("intermediate_size"), "normalize": settings.flag("norm_topk_prob", False),
    }
    mixer = {**_attention(settings), "qk_norm": norm, "qk_norm_over": "heads"}
    return parts.alike(settings, {"mixer": mixer, "channel_mixer": experts, "norm": norm}, norm)


POSTNORM = {"mixer_post_norm": "post_attention_layernorm", "channel_post_norm": "post_feedforward_layernorm"}


def _settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    return {**settings_of(config), "attention_bias": block.mixer.qkv_bias, "clip_qkv": block.mixer.qkv_clip}


def _olmo_settings(config: LanguageModelConfig) -> Table:
    return {name: value for name, value in _settings(config).items() if name != "rms_norm_eps"}


def _olmo2_settings(config: LanguageModelConfig) -> Table:
    return {name: value for name, value in _settings(config).items() if name != "clip_qkv"}


def _olmoe_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    moe = block.channel_mixer
    return {
        **_settings(config), "num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff,
        "norm_topk_prob": moe.normalize, "hidden_act": "silu",
    }


FAMILIES = (
    Family("olmo", "OlmoForCausalLM", _olmo, link, _olmo_settings),
    Family("olmo2", "Olmo2ForCausalLM", _olmo2, partial(link, norms=POSTNORM), _olmo2_settings),
    Family("olmoe", "OlmoeForCausalLM", _olmoe, link, _olmoe_settings),
)
