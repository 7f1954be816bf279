"""Llama 4 (its text model): attention inside chunks, layers without positions, and one routed expert beside a shared one."""

from __future__ import annotations

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def _told(settings: Settings, n: int) -> list[bool]:
    """Which layers have positions: those whose entry of ``no_rope_layers`` is 1."""
    every = settings.count("no_rope_layer_interval", 4)
    said = settings.take("no_rope_layers", None, kind=list) or [(i + 1) % every != 0 for i in range(n)]
    if len(said) != n:
        raise CheckpointError(f"{settings.where}: no_rope_layers has {len(said)} entries for {n} layers")
    return [bool(one) for one in said]


def _mixer(settings: Settings, *, chunked: bool, told: bool) -> Table:
    table = heads(settings, width=128)
    table |= parts.biased(settings)
    table["position"] = {**rope(settings, theta=500000.0), "interleaved": True} if told else {"type": "none"}
    normed = settings.flag("use_qk_norm", True) and told
    tuned, floor = settings.take("attn_temperature_tuning", True, kind=(int, bool)), settings.count("floor_scale", 8192)
    alpha = settings.number("attn_scale", 0.1)
    if tuned and not told:
        if chunked:
            raise CheckpointError(f"{settings.where}: attn_temperature_tuning of a layer that is chunked and has no positions")
        table["query_growth"] = {"every": floor, "alpha": alpha}
    if chunked:
        table |= {"type": "chunked_attention", "attention_chunk_size": settings.count("attention_chunk_size", 8192)}
    if normed:
        # Theirs stands after the rotation, which does not change a length; only where positions scale it, the order matters.
        scaling = table["position"].get("scaling", {}).get("type")
        if not chunked and scaling in ("yarn", "longrope"):
            raise CheckpointError(f"{settings.where}: use_qk_norm after {scaling} in a layer that is not chunked")
        table["qk_norm"] = {**parts.norm(settings, default=1e-5), "weight": False}
    return table


def _llama4(settings: Settings) -> Table:
    settings.only("hidden_act", "silu")
    settings.passed_over("for_llm_compressor")
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings, default=1e-5)
    told, step = _told(settings, n), settings.count("interleave_moe_layer_step", 1)
    size = settings.count("attention_chunk_size", None if "attention_chunk_size" in settings.values else 8192)
    chunked = parts.near_layers(settings, lambda i: size is None or not told[i], "chunked_attention")
    sparse = settings.take("moe_layers", list(range(step - 1, n, step)), kind=list)
    d_ff = settings.count("intermediate_size")
    dense = parts.gated(settings, settings.count("intermediate_size_mlp", 16384))
    experts = {
        "type": "moe", "scores": "sigmoid", "normalize": False, "weights_on": "input", "d_ff": d_ff, "d_ff_shared": d_ff,
        "n_experts": settings.count("num_local_experts", 16), "top_k": settings.count("num_experts_per_tok", 1),
    }
    layers = [
        {
            "mixer": _mixer(settings, chunked=chunked[i], told=told[i]), "channel_mixer": experts if i in sparse else dense,
            "norm": norm,
        }
        for i in range(n)
    ]
    return parts.stack(settings, layers, norm)


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for _, ours, theirs in parts.each_layer(links, config):
        parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
        mine, yours = f"{ours}.channel_mixer", f"{theirs}.feed_forward"
        if not links.has(f"{mine}.router"):
            parts.link_gated(links, mine, yours)
            continue
        links.same(f"{mine}.router", f"{yours}.router")
        parts.link_gated(links, f"{mine}.shared", f"{yours}.shared_expert")
        links.fused([f"{mine}.experts.{one}_proj" for one in ("gate", "up")], f"{yours}.experts.gate_up_proj", dim=2)
        links.same(f"{mine}.experts.down_proj", f"{yours}.experts.down_proj")


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    told = [block.mixer.position.type != "none" for block in blocks]
    chunked = [block.mixer.type == "chunked_attention" for block in blocks]
    first, sparse = blocks[0].mixer, [i for i, block in enumerate(blocks) if hasattr(block.channel_mixer, "n_experts")]
    found = {
        **parts.ends_settings(config), "num_attention_heads": first.n_heads, "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.head_dim or config.d_model // first.n_heads, "rms_norm_eps": blocks[0].norm.eps, "hidden_act": "silu",
        "no_rope_layers": [int(one) for one in told], "moe_layers": sparse, "attention_bias": first.qkv_bias,
        "layer_types": ["chunked_attention" if one else "full_attention" for one in chunked],
        "use_qk_norm": any(block.mixer.qk_norm is not None for block in blocks), "attn_temperature_tuning": False,
        "rope_parameters": rope_settings(next(b.mixer.position for b in blocks if b.mixer.position.type == "rope").to_dict()),
        "attention_chunk_size": blocks[chunked.index(True)].mixer.attention_chunk_size if any(chunked) else None,
    }
    grown = next((b.mixer.query_growth for b in blocks if getattr(b.mixer, "query_growth", None)), None)
    if grown is not None:
        found |= {"attn_temperature_tuning": True, "floor_scale": grown.every, "attn_scale": grown.alpha}
    dense = next((b.channel_mixer for b in blocks if not hasattr(b.channel_mixer, "n_experts")), None)
    moe = blocks[sparse[0]].channel_mixer if sparse else None
    if moe is not None:
        found |= {"num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff}
    else:
        found["intermediate_size"] = config.d_model
    return found if dense is None else {**found, "intermediate_size_mlp": dense.d_ff}


FAMILIES = (Family("llama4_text", "Llama4ForCausalLM", _llama4, _link, _settings),)
