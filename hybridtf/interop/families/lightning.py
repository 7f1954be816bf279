"""MiniMax-01: lightning attention and softmax attention, with experts, on a stream that every norm renews."""

from __future__ import annotations

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.memories import FULL, LINEAR
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""What the settings give, and their checkpoints hold as well."""


def _minimax(settings: Settings) -> Table:
    norm, n = parts.norm(settings, default=1e-5), settings.count("num_hidden_layers", 32)
    kinds = parts.kinds(settings, (LINEAR, FULL), [LINEAR if i % 2 else FULL for i in range(n)])
    settings.only("hidden_act", "silu")
    n_heads, d_model = settings.count("num_attention_heads", 32), settings.count("hidden_size")
    width = settings.count("head_dim", d_model // n_heads)
    position = rope(settings, theta=1e6)
    _check(settings, n_heads)
    attention: Table = {
        "type": "attention", "n_heads": n_heads, "n_kv_heads": settings.count("num_key_value_heads", 8), "position": position,
    }
    if width * n_heads != d_model:
        attention["head_dim"] = width
    window = settings.take("sliding_window", None, kind=int)
    mixers = {
        FULL: attention if window is None else {**attention, "window": window},
        LINEAR: {
            "type": "lightning_attention", "n_heads": n_heads, "head_dim": width,
            "chunk_size": settings.count("block_size", 256),
        },
    }
    channel = {
        "type": "moe", "n_experts": settings.count("num_local_experts", 8), "top_k": settings.count("num_experts_per_tok", 2),
        "d_ff": settings.count("intermediate_size", 14336),
    }
    scales = {FULL: _scales(settings, "full_attn"), LINEAR: _scales(settings, "linear_attn")}
    layers = [
        {"type": "normed_stream", "mixer": mixers[kind], "channel_mixer": channel, "norm": norm, **scales[kind]}
        for kind in kinds
    ]
    return parts.stack(settings, layers, norm)


def _check(settings: Settings, n_heads: int) -> None:
    """Where transformers differs from the published code, there is no saying which model is meant."""
    if n_heads & (n_heads - 1):
        raise CheckpointError(f"{settings.where}: num_attention_heads is {n_heads}; decays are known for powers of two")


def _scales(settings: Settings, mixer: str) -> Table:
    """What the stream and the branches are multiplied by."""
    found: Table = {}
    for option, name in (("skip_scale", "alpha"), ("residual_scale", "beta")):
        of_mixer, of_channel = (settings.number(f"{branch}_{name}_factor", 1.0) for branch in (mixer, "mlp"))
        if of_mixer != of_channel:
            found[option] = [of_mixer, of_channel]
        elif of_mixer != 1.0:
            found[option] = of_mixer
    return found


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        at, there = f"{ours}.channel_mixer", f"{theirs}.block_sparse_moe"
        links.same(f"{at}.router", f"{there}.gate")
        parts.link_experts(links, f"{at}.experts", f"{there}.experts", block.channel_mixer.n_experts, "w1", "w3", "w2")
        at, there = f"{ours}.mixer", f"{theirs}.self_attn"
        if block.mixer.type == "attention":
            parts.link_attention(links, at, there)
            continue
        parts.link_grouped(links, [f"{at}.{role}_proj" for role in "qkv"], f"{there}.qkv_proj", block.mixer.n_heads)
        links.named(at, there, {"output_norm": "norm", "gate_proj": "output_gate", "out_proj": "out_proj"})
        links.passed_over(*(f"{there}.{one}" for one in _BUFFERS))


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    attention, lightning = parts.first_of(blocks, "attention"), parts.first_of(blocks, "lightning_attention")
    moe, kinds = blocks[0].channel_mixer, [LINEAR if b.mixer.type == "lightning_attention" else FULL for b in blocks]
    found = {
        **parts.ends_settings(config), **parts.NO_TOKENS, "hidden_act": "silu", "rms_norm_eps": blocks[0].norm.eps,
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.kv_heads, "head_dim": lightning.head_dim,
        "rope_parameters": rope_settings(attention.position.to_dict()), "sliding_window": attention.window,
        "block_size": lightning.chunk_size, "num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_ff, "layer_types": kinds,
    }
    for option, name in (("skip_scale", "alpha"), ("residual_scale", "beta")):
        for kind, branch in ((FULL, "full_attn"), (LINEAR, "linear_attn")):
            found[f"{branch}_{name}_factor"] = blocks[kinds.index(kind)].of_branch(option, "mixer")
        found[f"mlp_{name}_factor"] = blocks[0].of_branch(option, "channel_mixer")
    return found


FAMILIES = (Family("minimax", "MiniMaxForCausalLM", _minimax, _link, _settings),)
