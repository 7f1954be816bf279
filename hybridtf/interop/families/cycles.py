"""HRM-Text: two stacks of shared layers that take turns, each with what the other gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig
from hybridtf.models.pattern import print_pattern


def _hrm(settings: Settings) -> Table:
    n, high, low = settings.count("num_layers_per_stack", settings.count("num_hidden_layers", 16)), "high", "low"
    settings.only("prefix_lm", False, default=True)  # else a part of each text sees all of itself
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.passed_over("L_bp_cycles")
    norm = {**parts.norm(settings), "weight": False}
    layer = {
        "mixer": {
            "type": "gated_attention", "n_heads": settings.count("num_attention_heads"),
            "head_dim": settings.count("head_dim", 128), "position": rope(settings), "qk_norm": {"type": "none"},
        },
        "channel_mixer": parts.gated(settings, settings.count("intermediate_size")), "norm": norm, "shared": True,
    }
    stacks = {name: [f"{name}{i}" for i in range(n)] for name in (high, low)}
    blocks = {name: layer for names in stacks.values() for name in names} | {
        "begin": {"type": "remember", "edge": high, "offset": True},
        "keep_high": {"type": "remember", "edge": high, "norm": norm},
        "keep_low": {"type": "remember", "edge": low, "norm": norm},
        "add_high": {"type": "inject", "edge": high, "norm": norm}, "add_low": {"type": "inject", "edge": low, "norm": norm},
    }
    cycles, inner = settings.count("H_cycles", 2), settings.count("L_cycles", 3)
    turn = [*stacks[low], *["add_high", *stacks[low]] * (inner - 1), "keep_low", "add_high", *stacks[high]]
    order = ["begin", *turn, *["keep_high", "add_low", *turn] * (cycles - 1)]
    if cycles == 1:
        blocks = {name: block for name, block in blocks.items() if name in order}
    scale = settings.number("embedding_scale", None) or 1.0 / settings.number("initializer_range", 0.02)
    return {
        **parts.ends(settings, tied=False), "stem": {"type": "token_embedding", "scale": scale}, "final_norm": norm,
        "pattern": print_pattern(order), "blocks": blocks,
    }


def _stacks(config: LanguageModelConfig) -> tuple[list[str], list[str]]:
    """Names of the low layers and of the high ones, each once."""
    layers = [name for name in dict.fromkeys(config.layers()) if config.blocks[name].type_name() not in ("remember", "inject")]
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    links.same("stack.layers.0.offset", "model.z_L_init")
    for stack, names in zip("LH", _stacks(config), strict=True):
        for i, name in enumerate(names):
            ours, theirs = f"stack.layers.shared_{name}", f"model.{stack}_module.layers.{i}"
            roles = [f"{ours}.mixer.{role}_proj.weight" for role in "qkv"]
            links.link(roles, [f"{theirs}.attn.gqkv_proj.weight"], _read_roles, _write_roles)
            links.same(f"{ours}.mixer.out_proj", f"{theirs}.attn.o_proj")
            parts.link_fused_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


def _read_roles(x: list[Tensor]) -> list[Tensor]:
    gate, q, k, v = x[0].chunk(4)
    return [torch.cat([q, gate]), k, v]


def _write_roles(x: list[Tensor]) -> list[Tensor]:
    q, gate = x[0].chunk(2)
    return [torch.cat([gate, q, *x[1:]])]


def _settings(config: LanguageModelConfig) -> Table:
    (first, *_), high = _stacks(config)
    order, n = config.layers(), len(high)
    cycles = order.count(high[0])
    block: Any = config.blocks[first]
    inner = order.count(first) // cycles
    stem, channel = config.stem, block.channel_mixer
    return {
        **parts.ends_settings(config), "num_layers_per_stack": n, "num_hidden_layers": n * cycles * (inner + 1),
        "H_cycles": cycles, "L_cycles": inner, "prefix_lm": False, "embedding_scale": stem.scale,  # type: ignore[attr-defined]
        "num_attention_heads": block.mixer.n_heads, "head_dim": block.mixer.head_dim, "rms_norm_eps": block.norm.eps,
        "intermediate_size": channel.d_ff, "hidden_act": parts.activation_name(getattr(channel, "activation", "silu")),
        "rope_parameters": rope_settings(block.mixer.position.to_dict()),
    }


FAMILIES = (Family("hrm_text", "HrmTextForCausalLM", _hrm, _link, _settings),)
