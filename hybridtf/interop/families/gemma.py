"""Gemma 1 to 3: norms that multiply by 1 + weight, scaled embeddings, and from Gemma 2 on norms on both sides and windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, link, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.models import LanguageModelConfig

SANDWICH = {
    "mixer_norm": "input_layernorm", "mixer_post_norm": "post_attention_layernorm", "channel_norm": "pre_feedforward_layernorm",
    "channel_post_norm": "post_feedforward_layernorm",
}
LOCAL, FULL = "sliding_attention", "full_attention"


def _norm(settings: Settings) -> Table:
    return {**parts.norm(settings), "unit_offset": True}


def _heads(settings: Settings) -> Table:
    settings.only("use_bidirectional_attention", False)
    table = heads(settings, width=256)
    return {**table, **parts.biased(settings)}


def _scaled(settings: Settings, attention: Table) -> Table:
    """With the scale of the scores, where it is not that of the heads' width."""
    scalar = settings.number("query_pre_attn_scalar", 256)
    width = attention.get("head_dim", settings.count("hidden_size") // attention["n_heads"])
    return attention if scalar == width else {**attention, "scale": scalar**-0.5}


def _stack(settings: Settings, layers: list[Table], cap: float | None = None) -> Table:
    ends = parts.ends(settings, tied=True)
    if cap is not None:
        ends["head"]["softcap"] = cap
    return {
        **ends, "stem": {"type": "token_embedding", "scale": "sqrt_d_model"}, "final_norm": _norm(settings), **stack_of(layers)
    }


def _gemma(settings: Settings) -> Table:
    act = settings.take("hidden_act", "gelu_pytorch_tanh", kind=str)
    settings.passed_over("hidden_activation")
    channel = parts.gated(settings, settings.count("intermediate_size"), default="gelu_pytorch_tanh")
    if act == "gelu":  # the first files say so, and mean the other
        channel["activation"] = "gelu_tanh"
    layer = {"mixer": {**_heads(settings), "position": rope(settings)}, "channel_mixer": channel, "norm": _norm(settings)}
    return _stack(settings, [layer] * settings.count("num_hidden_layers"))


def _sandwich(settings: Settings, mixer: Table) -> Table:
    channel = parts.gated(settings, settings.count("intermediate_size"), act="hidden_activation", default="gelu_pytorch_tanh")
    return {"type": "sandwich", "mixer": mixer, "channel_mixer": channel, "norm": _norm(settings)}


def _gemma2(settings: Settings) -> Table:
    local = parts.near_layers(settings, lambda i: i % 2 == 1)
    settings.passed_over("hidden_act")
    attention = {**_scaled(settings, _heads(settings)), "position": rope(settings)}
    cap = parts.optional(settings, "attn_logit_softcapping", 50.0)
    if cap is not None:
        attention["softcap"] = cap
    window = {"window": settings.count("sliding_window", 4096)}
    layers = [_sandwich(settings, {**attention, **(window if near else {})}) for near in local]
    return _stack(settings, layers, parts.optional(settings, "final_logit_softcapping", 30.0))


def _gemma3(settings: Settings) -> Table:
    every = settings.count("sliding_window_pattern", settings.count("_sliding_window_pattern", 6))
    local = parts.near_layers(settings, lambda i: (i + 1) % every == 0)
    settings.only("attn_logit_softcapping", None, default=None)
    attention = {**_scaled(settings, _heads(settings)), "qk_norm": _norm(settings)}
    full = {**attention, "position": rope(settings, theta=1e6, kind=FULL)}
    near = {**attention, "window": settings.count("sliding_window", 4096), "position": _near(settings)}
    layers = [_sandwich(settings, near if is_near else full) for is_near in local]
    return _stack(settings, layers, parts.optional(settings, "final_logit_softcapping", None))


def _near(settings: Settings) -> Table:
    """Positions of the layers with a window; in older files a base alone, and all scaling is of the others."""
    base = settings.number("rope_local_base_freq", 10000.0)
    if LOCAL in (settings.values.get("rope_parameters") or {}):
        return rope(settings, kind=LOCAL)
    return {"type": "rope"} if base == 10000.0 else {"type": "rope", "theta": base}


# -- back --------------------------------------------------------------------------------------------------------------


def _gemma_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    return {**settings_of(config), "attention_bias": block.mixer.qkv_bias}


def _gemma2_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    found = _gemma_settings(config)
    act, scale = found.pop("hidden_act"), block.mixer.scale
    head: Any = config.head
    return {
        **found, **parts.window_settings(config), "hidden_activation": act,
        "query_pre_attn_scalar": found["head_dim"] if scale is None else round(scale**-2),
        "attn_logit_softcapping": block.mixer.softcap, "final_logit_softcapping": head.softcap,
    }


def _gemma3_settings(config: LanguageModelConfig) -> Table:
    mixers: list[Any] = [block.mixer for block in config.blocks.values()]  # type: ignore[attr-defined]
    positions = {FULL if mixer.window is None else LOCAL: rope_settings(mixer.position.to_dict()) for mixer in mixers}
    return {**_gemma2_settings(config), "rope_parameters": positions}


_link = partial(link, norms=SANDWICH)

FAMILIES = (
    Family("gemma", "GemmaForCausalLM", _gemma, link, _gemma_settings),
    Family("gemma2", "Gemma2ForCausalLM", _gemma2, _link, _gemma2_settings),
    Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _link, _gemma3_settings),
)
