"""Decoders with windows in some layers or all: Phi-3, StarCoder 2, OLMo 3, SmolLM3, Ministral, EXAONE 4, Command R7B."""

from __future__ import annotations

from functools import partial
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads, link, settings_of
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

LOCAL, FULL = "sliding_attention", "full_attention"
NOWHERE = {"type": "none"}


def _biased(settings: Settings, attention: Table) -> Table:
    bias = settings.flag("attention_bias", False)
    return {**attention, "qkv_bias": True, "out_bias": True} if bias else attention


def _stack(settings: Settings, layers: list[Table], *, tied: bool = False) -> Table:
    """``final_norm`` is of the kind of the layers' norms."""
    return {**parts.ends(settings, tied=tied), "final_norm": layers[0]["norm"], **stack_of(layers)}


def _gated(settings: Settings, *, bias: bool = False) -> Table:
    return parts.gated(settings, settings.count("intermediate_size"), bias=bias)


# -- Phi-3 -------------------------------------------------------------------------------------------------------------


def _phi3(settings: Settings) -> Table:
    settings.passed_over("resid_pdrop", "embd_pdrop")
    said = dict(settings.take("rope_parameters", settings.take("rope_scaling", {}, kind=dict), kind=dict))
    original, kind = settings.count("original_max_position_embeddings", 4096), said.pop("type", "default")
    if said.setdefault("rope_type", kind) in ("su", "yarn", "longrope"):  # the first files call it by the former two names
        said |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    settings.values |= {"rope_parameters": said, "rope_scaling": None}
    attention = {**heads(settings), "position": rope(settings, fraction=1.0)}
    size = settings.count("sliding_window", None)
    layer = {
        "mixer": attention if size is None else {**attention, "window": size}, "channel_mixer": _gated(settings),
        "norm": parts.norm(settings, default=1e-5),
    }
    return _stack(settings, [layer] * settings.count("num_hidden_layers"))


def _link_phi3(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for _, ours, theirs in parts.each_layer(links, config):
        links.fused([f"{ours}.mixer.{one}_proj" for one in "qkv"], f"{theirs}.self_attn.qkv_proj")
        links.same(f"{ours}.mixer.out_proj", f"{theirs}.self_attn.o_proj")
        parts.link_fused_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


def _phi3_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    # Without a word on it transformers takes 32000 for the pad, which a small vocabulary does not have.
    found = {**settings_of(config), "sliding_window": block.mixer.window, "pad_token_id": None}
    found["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    original = found["rope_parameters"].get("original_max_position_embeddings")
    return found if original is None else {**found, "original_max_position_embeddings": original}


# -- StarCoder 2 -------------------------------------------------------------------------------------------------------


def _starcoder2(settings: Settings) -> Table:
    settings.passed_over("residual_dropout", "embedding_dropout", "activation_function")
    settings.only("norm_type", "layer_norm")
    settings.only("mlp_type", "default")
    bias = settings.flag("use_bias", True)
    attention = {**heads(settings), "qkv_bias": bias, "out_bias": bias, "position": rope(settings)}
    size = settings.count("sliding_window", None)
    layer = {
        "mixer": attention if size is None else {**attention, "window": size},
        "channel_mixer": {
            "type": "mlp", "d_ff": settings.count("intermediate_size"), "bias": bias,
            "activation": parts.activation(settings, default="gelu_pytorch_tanh"),
        },
        "norm": {"type": "layer_norm", "eps": settings.number("norm_epsilon", 1e-5)},
    }
    return _stack(settings, [layer] * settings.count("num_hidden_layers"), tied=True)


def _link_starcoder2(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for _, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
        links.same(f"{ours}.channel_mixer.up_proj", f"{theirs}.mlp.c_fc")
        links.same(f"{ours}.channel_mixer.down_proj", f"{theirs}.mlp.c_proj")


def _starcoder2_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    found = {**settings_of(config), "sliding_window": block.mixer.window, "use_bias": block.mixer.qkv_bias}
    return {"norm_epsilon": found.pop("rms_norm_eps"), **found}


# -- norms of what comes out, or none but one --------------------------------------------------------------------------


def _olmo3(settings: Settings) -> Table:
    norm = parts.norm(settings, default=1e-5)
    attention = {**_biased(settings, heads(settings)), "qk_norm": norm, "qk_norm_over": "heads"}
    full = {**attention, "position": rope(settings, theta=500000.0, kind=FULL)}
    near = {**attention, "window": settings.count("sliding_window", 4096), "position": _unscaled(settings)}
    local, channel = parts.near_layers(settings, lambda i: i % 4 == 3), _gated(settings)
    layer = {"type": "output_norm", "channel_mixer": channel, "norm": norm}
    return _stack(settings, [{**layer, "mixer": near if is_near else full} for is_near in local])


def _unscaled(settings: Settings) -> Table:
    """Positions of OLMo 3's layers with a window: in older files the base of the others, and none of their scaling."""
    if LOCAL in (settings.values.get("rope_parameters") or {}):
        return rope(settings, theta=500000.0, kind=LOCAL)
    return {"type": "rope", "theta": settings.number("rope_theta", 500000.0)}


def _olmo3_settings(config: LanguageModelConfig) -> Table:
    mixers: list[Any] = [block.mixer for block in config.blocks.values()]  # type: ignore[attr-defined]
    positions = {FULL if mixer.window is None else LOCAL: rope_settings(mixer.position.to_dict()) for mixer in mixers}
    return {**_windowed_settings(config), "rope_parameters": positions, "attention_bias": mixers[0].qkv_bias}


def _exaone4(settings: Settings) -> Table:
    norm, size = parts.norm(settings, default=1e-5), settings.count("sliding_window", None)
    every = settings.take("sliding_window_pattern", 4, kind=(int, str))
    if isinstance(every, str):
        every = len(every) if every.strip("L") == "G" and every.endswith("G") else 0
    local = parts.near_layers(settings, lambda i: size is None or (i + 1) % max(every, 1) == 0)
    if any(local) and size is None:
        raise CheckpointError(f"{settings.where}: layer_types has sliding_attention, and sliding_window is missing")
    attention, position = {**heads(settings), "qk_norm": norm}, rope(settings)
    near = {**attention, "position": position, "window": size}
    full = {**attention, "position": position if size is None else NOWHERE}
    channel = _gated(settings)
    layer = {"type": "output_norm", "channel_mixer": channel, "norm": norm}
    return _stack(settings, [{**layer, "mixer": near if is_near else full} for is_near in local])


def _exaone4_settings(config: LanguageModelConfig) -> Table:
    return {**_windowed_settings(config), "sliding_window_pattern": None}


def _cohere2(settings: Settings) -> Table:
    for name, said in (
        ("position_embedding_type", "rope_gptj"), ("rotary_pct", 1.0), ("use_gated_activation", True),
        ("use_parallel_block", True), ("use_qk_norm", False),
    ):
        settings.only(name, said)
    settings.only("head_dim", settings.count("hidden_size") // settings.count("num_attention_heads"))
    settings.passed_over("use_embedding_sharing", "use_parallel_embedding", "order_of_interleaved_layers")
    every = settings.count("layer_switch", 4)
    every = settings.count("sliding_window_pattern", settings.count("_sliding_window_pattern", every))
    local = parts.near_layers(settings, lambda i: (i + 1) % every == 0)
    attention = _biased(settings, heads(settings))
    near = {
        **attention, "window": settings.count("sliding_window", 4096), "position": {**rope(settings), "interleaved": True}
    }
    full, channel = {**attention, "position": NOWHERE}, _gated(settings)
    norm = {"type": "layer_norm", "eps": settings.number("layer_norm_eps", 1e-5), "bias": False}
    layers = [
        {"type": "parallel", "shared_norm": True, "mixer": near if is_near else full, "channel_mixer": channel, "norm": norm}
        for is_near in local
    ]
    table = _stack(settings, layers, tied=True)
    scale = settings.number("logit_scale", 0.0625)
    return table if scale == 1.0 else {**table, "head": {**table["head"], "scale": scale}}


def _cohere2_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    head: Any = config.head
    found = _windowed_settings(config)
    return {
        "layer_norm_eps": found.pop("rms_norm_eps"), **found, "logit_scale": head.scale, "attention_bias": block.mixer.qkv_bias
    }


# -- norms before each branch ------------------------------------------------------------------------------------------


def _smollm3(settings: Settings) -> Table:
    n, every = settings.count("num_hidden_layers"), settings.count("no_rope_layer_interval", 4)
    told = settings.take("no_rope_layers", None, kind=list) or [int((i + 1) % every != 0) for i in range(n)]
    if len(told) != n:
        raise CheckpointError(f"{settings.where}: no_rope_layers has {len(told)} entries for {n} layers")
    used, size = settings.flag("use_sliding_window", False), settings.count("sliding_window", None)
    settings.passed_over("max_window_layers")
    local = parts.near_layers(settings, lambda i: size is None or bool(told[i]))
    attention, position = _biased(settings, heads(settings)), rope(settings, theta=2e6)
    norm, channel = parts.norm(settings), _gated(settings, bias=settings.flag("mlp_bias", False))
    layers = [
        {
            "mixer": {
                **attention, "position": position if told[i] else NOWHERE,
                **({"window": size} if near and used and size is not None else {}),
            },
            "channel_mixer": channel, "norm": norm,
        }
        for i, near in enumerate(local)
    ]
    return _stack(settings, layers, tied=True)


def _smollm3_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    windows = parts.window_settings(config)
    return {
        **settings_of(config), **windows, "use_sliding_window": windows["sliding_window"] is not None, "pad_token_id": None,
        "no_rope_layers": [int(block.mixer.position.type != "none") for block in blocks],
        "attention_bias": blocks[0].mixer.qkv_bias, "mlp_bias": blocks[0].channel_mixer.bias,
    }


def _ministral(settings: Settings) -> Table:
    size, position = settings.count("sliding_window", None), rope(settings)
    local = parts.near_layers(settings, lambda i: size is None)
    if any(local) and size is None:
        raise CheckpointError(f"{settings.where}: layer_types has sliding_attention, and sliding_window is missing")
    attention = {**heads(settings), "position": position}
    channel, norm = _gated(settings), parts.norm(settings)
    layers = [
        {"mixer": {**attention, **({"window": size} if near else {})}, "channel_mixer": channel, "norm": norm} for near in local
    ]
    return _stack(settings, layers)


def _windowed_settings(config: LanguageModelConfig) -> Table:
    return {**settings_of(config), **parts.window_settings(config)}


_AFTER = {"mixer_post_norm": "post_attention_layernorm", "channel_post_norm": "post_feedforward_layernorm"}
_link_after = partial(link, norms=_AFTER)
_link_parallel = partial(link, norms={"mixer_norm": "input_layernorm"})

FAMILIES = (
    Family("olmo3", "Olmo3ForCausalLM", _olmo3, _link_after, _olmo3_settings),
    Family("smollm3", "SmolLM3ForCausalLM", _smollm3, link, _smollm3_settings),
    Family("ministral", "MinistralForCausalLM", _ministral, link, _windowed_settings),
    Family("exaone4", "Exaone4ForCausalLM", _exaone4, _link_after, _exaone4_settings),
    Family("cohere2", "Cohere2ForCausalLM", _cohere2, _link_parallel, _cohere2_settings),
    Family("phi3", "Phi3ForCausalLM", _phi3, _link_phi3, _phi3_settings),
    Family("starcoder2", "Starcoder2ForCausalLM", _starcoder2, _link_starcoder2, _starcoder2_settings),
)
