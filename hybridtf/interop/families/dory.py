"""Dory: unit vectors throughout (nGPT), windows in most layers, and a section of layers that is passed several times."""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig
from hybridtf.models.pattern import print_pattern

NEAR, FULL = "sliding_attention", "full_attention"
NORM = {"type": "l2_norm", "eps": 1e-6}
LOOP = ("keep", "add")
"""The blocks that keep what goes into the loop, and add it to what each pass starts from."""


# -- settings ----------------------------------------------------------------------------------------------------------


def _paired(settings: Settings) -> int:
    """2 where attention and channels count as a layer each, as in published files; 1 where they do not."""
    return 2 if "mlp" in settings.take("layer_types", [], kind=list) else 1


def _sections(settings: Settings) -> tuple[list[str], int, int]:
    """The kind of each layer, how many stand before the loop, and how many are in it."""
    by = _paired(settings)
    n, first, last = (
        settings.take(name, default, kind=int) // by
        for name, default in (("num_hidden_layers", 36), ("n_input_layers", 8), ("n_output_layers", 8))
    )
    listed = settings.take("layer_types", None, kind=list)
    kinds = [NEAR if (i + 1) % 4 else FULL for i in range(n)] if listed is None else listed[::by]
    if by == 2 and listed is not None and set(listed[1::2]) - {"mlp"}:
        raise CheckpointError(f"{settings.where}: layer_types is {listed}; known here: attention and mlp in turn")
    inside = n - first - last
    if len(kinds) != n or set(kinds) - {NEAR, FULL} or settings.take("n_recurrent_layers", by * inside) != by * inside:
        raise CheckpointError(f"{settings.where}: layer_types is {kinds} for {first} + {inside} + {last} layers")
    return kinds, first, inside


def _layers(settings: Settings) -> dict[str, Table]:
    """A layer, by its kind."""
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    width, d_model = settings.count("head_dim", 256), settings.count("hidden_size")
    stored = settings.number("initializer_range", 0.0177)
    attention = {
        "type": "attention", "n_heads": settings.count("num_attention_heads"),
        "n_kv_heads": settings.count("num_key_value_heads", 4), "head_dim": width, "qk_norm": NORM, "out_norm": NORM,
        "query_factor": {"start": width**0.5, "stored": stored}, "output_gate": True,
        "gate_factor": {"start": d_model**0.25, "stored": stored},
    }
    window = {NEAR: {"window": settings.count("sliding_window", 1024)}, FULL: {}}
    theta = 10000.0 if "rope_parameters" in settings else 10000000.0
    positions = {NEAR: rope(settings, kind=NEAR), FULL: rope(settings, theta=theta, kind=FULL)}
    inner = {"start": d_model**0.5}
    channel = {
        "type": "glu", "d_ff": settings.count("intermediate_size", 7168), "activation": parts.activation(settings),
        "gate_factor": inner, "up_factor": inner, "inner_norm": NORM,
    }
    return {
        kind: {
            "type": "interpolated", "mixer": {**attention, **window[kind], "position": positions[kind]},
            "channel_mixer": channel, "norm": NORM,
            "rate": {"start": settings.number("ngpt_alpha_init", 0.05), "stored": stored},
        }
        for kind in (NEAR, FULL)
    }


def _table(settings: Settings) -> Table:
    settings.only("recurrent_kv_cache_mode", "per_loop")
    kinds, first, inside = _sections(settings)
    layers, loops = _layers(settings), settings.count("n_recurrent_loops", 2)
    blocks: dict[str, Table] = {kind: layers[kind] for kind in (NEAR, FULL) if kind in kinds[:first] + kinds[first + inside :]}
    looped = {f"loop{i}": {**layers[kind], "shared": True} for i, kind in enumerate(kinds[first : first + inside])}
    keep, add = LOOP
    blocks |= looped | {
        keep: {"type": "remember", "edge": "start", "norm": NORM},
        add: {"type": "inject", "edge": "start", "norm": NORM, "shared": True},
    }
    order = [*kinds[:first], keep, *[add, *looped] * loops, *kinds[first + inside :]]
    ends = parts.ends(settings, tied=False)
    settings.only("tie_word_embeddings", False)
    head = {**ends["head"], "token_factor": {"stored": settings.number("initializer_range", 0.0177)}}
    return {**ends, "head": head, "final_norm": NORM, "pattern": print_pattern(order), "blocks": blocks}


# -- weights and back --------------------------------------------------------------------------------------------------

_NAMES = {
    "mixer.q_proj": "self_attn.q_proj", "mixer.k_proj": "self_attn.k_proj", "mixer.v_proj": "self_attn.v_proj",
    "mixer.out_proj": "self_attn.o_proj", "mixer.gate_proj": "self_attn.g_proj",
    "mixer.query_factor.weight": "self_attn.sqk", "mixer.gate_factor.weight": "self_attn.s_gate",
    "mixer_rate.weight": "lambda_1", "channel_rate.weight": "lambda_2",
    "channel_mixer.gate_factor.weight": "mlp.suv_gate", "channel_mixer.up_factor.weight": "mlp.suv_up",
}


def _order(config: LanguageModelConfig) -> list[tuple[str, str]]:
    """Each layer of theirs: where ours stands in the stack, and its block."""
    found = []
    for i, name in enumerate(config.layers()):
        where = f"shared_{name}" if config.blocks[name].shared else str(i)
        if config.blocks[name].type_name() == "interpolated" and (where, name) not in found:
            found.append((where, name))
    return found


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="backbone", embedding="embeddings")
    links.same("head.token_factor.weight", "lm_head.logit_scale")
    for i, (where, _) in enumerate(_order(config)):
        ours, theirs = f"stack.layers.{where}", f"backbone.layers.{i}"
        links.named(ours, theirs, _NAMES)
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


def _settings(config: LanguageModelConfig) -> Table:
    blocks: list[Any] = [config.blocks[name] for _, name in _order(config)]
    order, looped = config.layers(), [block.shared for block in blocks]
    keep = next(i for i, name in enumerate(order) if config.blocks[name].type_name() == "remember")
    inside, block = sum(looped), blocks[0]
    by_kind = {NEAR if one.mixer.window else FULL: one.mixer for one in blocks}
    near = by_kind.get(NEAR)
    return {
        **parts.ends_settings(config), "num_hidden_layers": 2 * len(blocks), "n_input_layers": 2 * keep,
        "n_recurrent_layers": 2 * inside, "n_output_layers": 2 * (len(blocks) - keep - inside),
        "n_recurrent_loops": sum(name == order[keep + 1] for name in order),
        "layer_types": [kind for one in blocks for kind in (NEAR if one.mixer.window else FULL, "mlp")],
        "num_attention_heads": block.mixer.n_heads, "num_key_value_heads": block.mixer.n_kv_heads,
        "head_dim": block.mixer.head_dim, **({} if near is None else {"sliding_window": near.window}),
        "intermediate_size": block.channel_mixer.d_ff, "hidden_act": parts.activation_name(block.channel_mixer.activation),
        "rope_parameters": {kind: rope_settings(mixer.position.to_dict()) for kind, mixer in by_kind.items()},
        "initializer_range": block.rate.stored, "ngpt_alpha_init": block.rate.start, **parts.NO_TOKENS,
    }


FAMILIES = (Family("dory", "DoryForCausalLM", _table, _link, _settings),)
