"""Gemma 3n, its text models: alternating updates over several streams, learned residuals, embeddings of each token for each
layer, sparse gates, and last layers that share keys and values.

A layer is two of ours: ``altup``, then ``altup_side``, which reads the token's embedding of that layer.
"""

from __future__ import annotations

from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.gemma import FULL, LOCAL, SANDWICH
from hybridtf.interop.families.gemma4 import (
    GELU,
    attending,
    attention_of,
    common_settings,
    ends_of,
    gate_layer,
    kinds_of,
    layer_inputs,
    link_gate,
    link_layer_inputs,
    link_own_or_shared,
    shared_of,
)
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

HALVED = 2**-0.5
SPARSE = 10
"""Layers with sparse gates, of a model with more than these, where the settings do not say."""


def _each(settings: Settings, name: str, default: Any, n: int) -> list[Any]:
    """A setting with a value for each layer, or one for all."""
    said = settings.take(name, default, kind=(int, list))
    values = [said] * n if isinstance(said, int) else list(said)
    if len(values) != n:
        raise CheckpointError(f"{settings.where}: {name} has {len(values)} entries for {n} layers")
    return values


def _positions(settings: Settings) -> dict[str, Table]:
    """By kind; older files have the base of layers with a window apart, and all scaling is of the others."""
    said = settings.values.get("rope_parameters") or {}
    local = settings.number("rope_local_base_freq", 10000.0)
    if LOCAL in said:
        near = rope(settings, theta=local, kind=LOCAL)
    else:
        near = {"type": "rope"} if local == 10000.0 else {"type": "rope", "theta": local}
    return {FULL: rope(settings, theta=1e6, kind=FULL), LOCAL: near}


def _gemma3n(settings: Settings) -> Table:
    settings.only("altup_active_idx", 0)
    settings.only("altup_correct_scale", True)
    settings.passed_over("altup_coef_clip")  # of training
    kinds, norm = kinds_of(settings, 5), parts.norm(settings)
    n, streams = len(kinds), {"n_streams": settings.count("altup_num_inputs", 4)}
    widths = _each(settings, "intermediate_size", 16384, n)
    n_sparse = SPARSE if n > SPARSE else 0
    sparsity = _each(settings, "activation_sparsity_pattern", [0.95] * n_sparse + [0.0] * (n - n_sparse), n)
    told, shared, position = layer_inputs(settings, 256), shared_of(settings, kinds, 15), _positions(settings)
    if not told:
        raise CheckpointError(f"{settings.where}: hidden_size_per_layer_input is 0, and a layer has to read something")
    window, layers = {"window": settings.count("sliding_window", 512)}, []
    for kind, group, d_ff, share in zip(kinds, shared, widths, sparsity, strict=True):
        mixer = attention_of(
            settings, group, n_kv_heads=settings.count("num_key_value_heads", 2), head_dim=settings.count("head_dim", 256)
        )
        channel = parts.gated(settings, d_ff, act="hidden_activation", default=GELU)
        layers.append({
            "type": "altup", **streams, "mixer": {**mixer, "position": position[kind], **(window if kind == LOCAL else {})},
            "channel_mixer": {**channel, "gate_sparsity": share} if share else channel, "norm": norm,
            "laurel": {"rank": settings.count("laurel_rank", 64), "norm": norm}, "skip_scale": [HALVED, 1.0],
            "residual_scale": [HALVED, 1.0],
        })
        layers.append({**gate_layer(settings, told["layer_inputs"]["d_layer"]), "type": "altup_side", **streams})
    table = ends_of(settings, parts.optional(settings, "final_logit_softcapping", 30.0))
    apart: Table = {"spread": {"type": "projected"}, "merge": {"type": "projected"}}
    return {**table, "stem": {**table["stem"], **told}, **apart, **stack_of(layers)}


# -- weights -----------------------------------------------------------------------------------------------------------


LAYER = {
    **SANDWICH, "mixer_laurel.down": "laurel.linear_left", "mixer_laurel.up": "laurel.linear_right",
    "mixer_laurel.norm": "laurel.post_laurel_norm", "streams.norm": "altup.router_norm",
    "streams.router": "altup.modality_router.weight", "streams.prediction": "altup.prediction_coefs.weight",
    "streams.correction": "altup.correction_coefs.weight",
}
"""Theirs of ours in a layer, beside its mixers."""


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    link_layer_inputs(links)
    for i in range(parts.first_block(config).n_streams - 1):
        links.same(f"stack.spread.projs.{i}", f"model.altup_projections.{i}")
        links.same(f"stack.merge.streams.projs.{i}", f"model.altup_unembed_projections.{i}")
    layer = -1
    for i, name in enumerate(config.layers()):
        ours, block = f"stack.layers.{i}", config.blocks[name]
        layer += block.type_name() == "altup"
        theirs = f"model.layers.{layer}"
        if block.type_name() != "altup":
            link_gate(links, ours, theirs)
            links.same(f"{ours}.read_scale", f"{theirs}.altup.correct_output_scale")
            continue
        links.named(ours, theirs, LAYER)
        link_own_or_shared(links, ours, theirs)
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


# -- back --------------------------------------------------------------------------------------------------------------


def _settings(config: LanguageModelConfig) -> Table:
    blocks = attending(config)
    channels = [block.channel_mixer for block in blocks]
    return {
        **common_settings(config), "hidden_activation": parts.activation_name(channels[0].activation),
        "intermediate_size": [channel.d_ff for channel in channels], "altup_num_inputs": blocks[0].n_streams,
        "activation_sparsity_pattern": [channel.gate_sparsity for channel in channels], "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": blocks[0].laurel.rank,
    }


FAMILIES = (Family("gemma3n_text", "Gemma3nForCausalLM", _gemma3n, _link, _settings),)
