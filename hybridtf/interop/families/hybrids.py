"""Mamba or Mamba-2 with attention: Jamba, Bamba."""

from __future__ import annotations

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def kinds_of(settings: Settings, default: list[str]) -> list[str]:
    """``linear_attention`` (a recurrence) or ``full_attention`` of each layer."""
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    said = settings.take("layers_block_type", settings.take("layer_types", default, kind=list), kind=list)
    kinds = [names.get(kind, kind) for kind in said]
    n = settings.count("num_hidden_layers")
    unknown = sorted({kind for kind in kinds if kind not in names.values()})
    if len(kinds) != n or unknown:
        more = f", and unknown {unknown}" if unknown else ""
        raise CheckpointError(f"{settings.where}: layer_types has {len(kinds)} entries for {n} layers{more}")
    return kinds


# -- Jamba -------------------------------------------------------------------------------------------------------------


def _jamba(settings: Settings) -> Table:
    n, d_model, norm = settings.count("num_hidden_layers"), settings.count("hidden_size"), parts.norm(settings)
    settings.only("hidden_act", "silu")  # of Mamba's branches too, which have no other here
    period, offset = settings.count("attn_layer_period", 8), settings.take("attn_layer_offset", 4, kind=int)
    kinds = kinds_of(settings, ["full_attention" if i % period == offset else "linear_attention" for i in range(n)])
    every, first = settings.count("expert_layer_period", 2), settings.take("expert_layer_offset", 1, kind=int)
    n_experts, d_ff = settings.count("num_experts", 16), settings.count("intermediate_size")
    rank = settings.take("mamba_dt_rank", "auto")
    settings.passed_over("max_position_embeddings", "sliding_window", "mamba_inner_layernorms", "use_positional_embeddings")
    mamba = {
        "type": "mamba", "d_state": settings.count("mamba_d_state", 16), "d_conv": settings.count("mamba_d_conv", 4),
        "expand": settings.number("mamba_expand", 2), "dt_rank": -(-d_model // 16) if rank == "auto" else rank,
        "bias": settings.flag("mamba_proj_bias", False), "conv_bias": settings.flag("mamba_conv_bias", True),
        "ssm_norm": "rms", "eps": norm["eps"],
    }
    attention = {**heads(settings), "position": {"type": "none"}}
    dense = parts.gated(settings, d_ff)
    top_k = settings.count("num_experts_per_tok", 2)
    sparse = {"type": "moe", "n_experts": n_experts, "top_k": top_k, "d_ff": d_ff, "normalize": False}
    layers = [
        {
            "mixer": attention if kind == "full_attention" else mamba, "norm": norm,
            "channel_mixer": sparse if n_experts > 1 and i % every == first else dense,
        }
        for i, kind in enumerate(kinds)
    ]
    return parts.stack(settings, layers, norm)


def _link_jamba(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, norm="final_layernorm")
    for block, ours, theirs in parts.each_layer(links, config, ("input_layernorm", "pre_ff_layernorm")):
        parts.link_scan_or_attention(links, f"{ours}.mixer", theirs, block.mixer)
        links.named(f"{ours}.mixer", f"{theirs}.mamba", {f"{one}_norm": f"{one}_layernorm" for one in ("dt", "b", "c")})
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.feed_forward", block.channel_mixer, router="router")


def _jamba_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mamba = next(b.mixer for b in blocks if b.mixer.type == "mamba")
    attention = [i for i, b in enumerate(blocks) if b.mixer.type != "mamba"]
    experts = [i for i, b in enumerate(blocks) if hasattr(b.channel_mixer, "n_experts")]
    found = {
        **parts.ends_settings(config), "rms_norm_eps": blocks[0].norm.eps, "intermediate_size": blocks[0].channel_mixer.d_ff,
        "hidden_act": parts.activation_name(getattr(blocks[0].channel_mixer, "activation", "silu")),
        "mamba_d_state": mamba.d_state, "mamba_d_conv": mamba.d_conv, "mamba_expand": parts.whole(mamba.expand),
        "mamba_dt_rank": mamba.dt_rank, "mamba_proj_bias": mamba.bias, "mamba_conv_bias": mamba.conv_bias, "num_experts": 1,
        **_every("attn_layer", attention, len(blocks)), **_every("expert_layer", experts, len(blocks)),
    }
    if experts:
        moe = blocks[experts[0]].channel_mixer
        found |= {"num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k}
    heads_of = blocks[attention[0]].mixer if attention else None
    if heads_of is not None:
        found |= {"num_attention_heads": heads_of.n_heads, "num_key_value_heads": heads_of.n_kv_heads}
    return found


def _every(name: str, layers: list[int], n: int) -> Table:
    """A period and an offset that give these layers, as far as there are such; an export checks it."""
    period = layers[1] - layers[0] if len(layers) > 1 else n
    return {f"{name}_period": period, f"{name}_offset": layers[0] if layers else n}


# -- Bamba -------------------------------------------------------------------------------------------------------------


def _bamba(settings: Settings) -> Table:
    norm, n = parts.norm(settings, default=1e-5), settings.count("num_hidden_layers")
    settings.only("hidden_act", "silu")
    attend = settings.take("attn_layer_indices", [], kind=list)
    kinds = kinds_of(settings, ["full_attention" if i in attend else "linear_attention" for i in range(n)])
    settings.passed_over("z_loss_coefficient")
    mamba = parts.mamba2(settings, norm["eps"])
    bias = settings.flag("attention_bias", False)
    # Half of a head, whatever the settings say, as transformers and the published model have it.
    position = {**rope(settings, fraction=0.5), "fraction": 0.5}
    attention = {**heads(settings), "qkv_bias": bias, "out_bias": bias, "position": position}
    channel = parts.gated(settings, settings.count("intermediate_size"), bias=settings.flag("mlp_bias", False))
    mixers = {"full_attention": attention, "linear_attention": mamba}
    layers = [{"mixer": mixers[kind], "channel_mixer": channel, "norm": norm} for kind in kinds]
    return parts.stack(settings, layers, norm)


def _link_bamba(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, norm="final_layernorm")
    for block, ours, theirs in parts.each_layer(links, config, ("input_layernorm", "pre_ff_layernorm")):
        parts.link_scan_or_attention(links, f"{ours}.mixer", theirs, block.mixer)
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.feed_forward")


def _bamba_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mamba = next(b.mixer for b in blocks if b.mixer.type == "mamba2")
    attend = [i for i, b in enumerate(blocks) if b.mixer.type != "mamba2"]
    attention, channel = blocks[attend[0]].mixer, blocks[0].channel_mixer
    found = {
        **parts.ends_settings(config), "rms_norm_eps": blocks[0].norm.eps, "intermediate_size": channel.d_ff,
        "mlp_bias": channel.bias, "hidden_act": "silu", "attn_layer_indices": attend, "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads, "attention_bias": attention.qkv_bias,
        "rope_parameters": rope_settings(attention.position.to_dict()), **parts.mamba2_settings(mamba, config.d_model),
    }
    return found


FAMILIES = (
    Family("jamba", "JambaForCausalLM", _jamba, _link_jamba, _jamba_settings),
    Family("bamba", "BambaForCausalLM", _bamba, _link_bamba, _bamba_settings),
)
