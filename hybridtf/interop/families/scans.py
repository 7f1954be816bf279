"""Stacks of Mamba, FalconMamba or Mamba-2 alone."""

from __future__ import annotations

from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

TRAINING = (
    "rescale_prenorm_residual", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_floor", "time_step_scale",
)
"""Settings that say how weights were drawn."""


def _stack(settings: Settings, mixer: Table, *, tied: bool) -> Table:
    settings.only("hidden_act", "silu")
    settings.passed_over("residual_in_fp32", *TRAINING)
    norm = parts.norm(settings, "layer_norm_epsilon", 1e-5)
    layers = [{"mixer": mixer, "norm": norm}] * settings.count("num_hidden_layers")
    ends = parts.ends(settings, tied=tied)
    settings.passed_over("max_position_embeddings")
    return {**ends, "final_norm": norm, **stack_of(layers)}


def _mamba(settings: Settings) -> Table:
    d_model, expand = settings.count("hidden_size"), settings.number("expand", 2)
    rank = settings.take("time_step_rank", "auto")
    mixer = {
        "type": "mamba", "d_state": settings.count("state_size", 16), "d_conv": settings.count("conv_kernel", 4),
        "d_inner": settings.count("intermediate_size", int(expand * d_model)),
        "dt_rank": -(-d_model // 16) if rank == "auto" else rank,
        "bias": settings.flag("use_bias", False), "conv_bias": settings.flag("use_conv_bias", True),
    }
    return _stack(settings, mixer, tied=True)


def _falcon_mamba(settings: Settings) -> Table:
    table = _mamba(settings)
    for block in table["blocks"].values():
        block["mixer"] |= {"ssm_norm": "weightless", "eps": settings.number("mixer_rms_eps", 1e-6)}
    return table


def _mamba2(settings: Settings) -> Table:
    head_dim, d_model = settings.count("head_dim", 64), settings.count("hidden_size")
    expand = settings.number("expand", 2)
    mixer: Table = {
        "type": "mamba2", "d_state": settings.count("state_size", 128), "head_dim": head_dim, "expand": expand,
        "n_heads": settings.count("num_heads", int(expand * d_model) // head_dim), "n_groups": settings.count("n_groups", 8),
        "d_conv": settings.count("conv_kernel", 4), "bias": settings.flag("use_bias", False),
        "conv_bias": settings.flag("use_conv_bias", True), "norm": True,
        "eps": settings.number("layer_norm_epsilon", 1e-5),
    }
    settings.only("rms_norm", True)  # transformers norms whatever it says
    settings.passed_over("chunk_size", "time_step_rank")
    return _stack(settings, {**mixer, **parts.step_limit(settings)}, tied=False)


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="backbone", embedding="embeddings", norm="norm_f")
    for block, ours, theirs in parts.each_layer(links, config, {"mixer_norm": "norm"}, prefix="backbone.layers"):
        (parts.link_mamba2 if block.mixer.type == "mamba2" else parts.link_mamba)(links, f"{ours}.mixer", f"{theirs}.mixer")


def _ends(config: LanguageModelConfig) -> Table:
    found = parts.ends_settings(config)
    block = parts.first_block(config)
    return {**found, "layer_norm_epsilon": block.norm.eps, "hidden_act": "silu"}


def _mamba_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer = block.mixer
    return {
        **_ends(config), "state_size": mixer.d_state, "conv_kernel": mixer.d_conv, "intermediate_size": mixer.d_inner,
        "expand": parts.whole(mixer.d_inner / config.d_model),
        "time_step_rank": mixer.dt_rank, "use_bias": mixer.bias, "use_conv_bias": mixer.conv_bias,
    }


def _falcon_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    return {**_mamba_settings(config), "mixer_rms_eps": block.mixer.eps}


def _mamba2_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer = block.mixer
    found = {
        **_ends(config), "state_size": mixer.d_state, "head_dim": mixer.head_dim, "num_heads": mixer.n_heads,
        "n_groups": mixer.n_groups, "expand": parts.whole(mixer.expand), "conv_kernel": mixer.d_conv, "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "rms_norm": mixer.norm, "chunk_size": 256,
    }
    return found if mixer.dt_limit is None else {**found, "time_step_limit": parts.limit_settings(mixer.dt_limit)}


FAMILIES = (
    Family("mamba", "MambaForCausalLM", _mamba, _link, _mamba_settings),
    Family("falcon_mamba", "FalconMambaForCausalLM", _falcon_mamba, _link, _falcon_settings),
    Family("mamba2", "Mamba2ForCausalLM", _mamba2, _link, _mamba2_settings),
)
