"""Parameters of transformers' Inkling 2 and Inkling 2 Loop by the names that they have here. What is said of values holds of
gradients too: all of it moves numbers about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

ATTENTION = {
    "q_proj.linear.weight": "q_proj.weight", "q_proj.norm.scale": "q_norm.scale", "k_proj.linear.weight": "k_proj.weight",
    "v_proj.linear.weight": "v_proj.weight", "o_proj.gate_proj.weight": "gate_proj.weight",
    "o_proj.linear.weight": "out_proj.weight", "sink_proj.weight": "sink_proj.weight",
    "relative_position_bias.proj": "rel_bank",
    "relative_position_bias.linear.weight": "r_proj.weight", "relative_position_bias.norm.scale": "r_norm.scale",
}
LAYER = {
    "input_layernorm.weight": "mixer_norm.weight", "q_input_layernorm.weight": "mixer_norm.weight",
    "k_input_layernorm.weight": "key_norm.weight", "v_input_layernorm.weight": "value_norm.weight",
    "post_attention_layernorm.weight": "channel_norm.weight", "mlp_input.query": "channel_depth.query",
    "mlp.gate.weight": "channel_mixer.channel_mixer.router.weight",
    "mlp.gate.e_score_correction_bias": "channel_mixer.channel_mixer.selection.bias",
}
MODEL = {
    "model.embed_tokens.weight": "stem.embedding.weight", "model.embed_tokens.embed_norm.weight": "stem.norm.weight",
    "model.norm.weight": "final_norm.weight", "model.final_input.query": "stack.merge.attention.query",
    "lm_head.weight": "head.proj.weight",
}
SITES = {"q": "mixer", "k": "key", "v": "value", "mlp": "channel"}
GATES = {"down_proj": "down_proj", "forget_gate_proj": "forget_proj", "message_gate_proj": "message_proj"}


def of_attention(name: str, p: Tensor, n_kv_heads: int) -> tuple[str, Tensor]:
    """Of one attention module."""
    if ".sconv." not in name:
        return ATTENTION[name], p
    which, part = name[0], name.split("sconv.")[1]
    if part == "conv1d.weight":
        return f"{which}_conv.weight", p.squeeze(1)
    if part == "static_weight":
        return f"{which}_conv.weight", p.flip(0).T  # their first tap is the token's own
    return f"{which}_conv.taps_proj.weight", p.unflatten(0, (n_kv_heads, -1)).flip(1).flatten(0, 1)


def of_layer(name: str, p: Tensor, n_kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Of one decoder layer."""
    if name.startswith("self_attn."):
        ours, value = of_attention(name.removeprefix("self_attn."), p, n_kv_heads)
        yield f"mixer.{ours}", value
    elif name == "attention_input.query":
        for site, query in zip(("mixer", "key", "value"), p.view(-1, p.shape[-1]), strict=False):
            yield f"{site}_depth.query", query
    elif name.endswith("convolution.conv1d.weight"):
        yield f"{'mixer' if 'attention' in name else 'channel_mixer'}.out_conv.weight", p.squeeze(1)
    elif name.startswith("mlp.experts."):
        experts = "channel_mixer.channel_mixer.experts"
        if "down" in name:
            yield f"{experts}.down_proj", p.mT
        else:
            for part, value in zip(("gate_proj", "up_proj"), p.chunk(2, 1), strict=True):
                yield f"{experts}.{part}", value.mT
    elif "_message_gate." in name:
        site, part = name.split("_message_gate.")
        part, _ = part.split(".")
        yield f"{SITES[site]}_gate.{GATES[part]}.weight", p
    else:
        yield LAYER[name], p


def of_model(config: Any, theirs: Mapping[str, Tensor], keys: tuple[str, ...]) -> dict[str, Tensor]:
    """Of a whole model for causal language modelling; ``keys``: the names of its layers' blocks here."""
    found: dict[str, Tensor] = {}
    for name, p in theirs.items():
        if name in MODEL:
            found[MODEL[name]] = p
        elif name == "model.message_input.query":
            for i, queries in enumerate(p):
                for site, query in zip(SITES.values(), queries, strict=True):
                    found[f"stack.layers.{keys[config.loop_layer_index_start + i]}.{site}_message.query"] = query
        else:
            i, part = name.removeprefix("model.layers.").split(".", 1)
            slides = config.layer_types[int(i)] == "hybrid_sliding"
            n_kv_heads = config.swa_num_key_value_heads if slides else config.num_key_value_heads
            found |= {f"stack.layers.{keys[int(i)]}.{ours}": value for ours, value in of_layer(part, p, n_kv_heads)}
    return found
