"""Delta-rule memories beside softmax attention: OLMo Hybrid, Kimi Linear and Ling's Bailing Hybrid."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridtf.interop.families import memories, parts
from hybridtf.interop.families.latents import latent_settings, link_latent
from hybridtf.interop.families.memories import FULL, LINEAR
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

# -- OLMo Hybrid -------------------------------------------------------------------------------------------------------


def _olmo(settings: Settings) -> Table:
    norm, n = parts.norm(settings), settings.count("num_hidden_layers", 32)
    default = memories.every_other(n, 4)
    kinds = parts.kinds(settings, (LINEAR, FULL), default if FULL in default else [*default[:-1], FULL])
    settings.only("hidden_act", "silu")
    settings.passed_over(*(f"linear_{one}" for one in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")))
    n_heads, keys = settings.count("num_attention_heads", 30), settings.count("linear_num_key_heads", None)
    width = settings.count("linear_key_head_dim", int(0.75 * settings.count("hidden_size") / (keys or n_heads)))
    memory = memories.gated_delta_net(settings, n_heads, n_heads, width, 2 * width, 1e-5)  # whatever rms_norm_eps is
    if settings.flag("linear_allow_neg_eigval", True):
        memory["allow_neg_eigval"] = True
    attention: Table = {
        "type": "attention", "n_heads": n_heads, "qk_norm": norm, "qk_norm_over": "heads", "position": _olmo_position(settings),
    }
    if settings.count("num_key_value_heads", n_heads) != n_heads:
        attention["n_kv_heads"] = settings.count("num_key_value_heads")
    if "head_dim" in settings:
        attention["head_dim"] = settings.count("head_dim")
    attention |= parts.biased(settings)
    channel = parts.gated(settings, settings.count("intermediate_size"))
    layers = [
        {"type": "output_norm", "mixer": attention, "channel_mixer": channel, "norm": norm} if kind == FULL
        else {"mixer": memory, "channel_mixer": channel, "norm": norm}
        for kind in kinds
    ]
    return parts.stack(settings, layers, norm)


def _olmo_position(settings: Settings) -> Table:
    """A base that is said to be null means that positions are not told; where nothing is said, the usual one."""
    said = settings.values.get("rope_parameters")
    base = (said or {}).get("rope_theta", settings.values.get("rope_theta", 10000.0))
    if base is None:
        settings.passed_over("rope_parameters", "rope_scaling", "rope_theta")
        return {"type": "none"}
    return rope(settings)


def _link_olmo(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config, {}):
        parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")
        if block.mixer.type == "attention":
            # The norm after the mixer bears the name that a memory's layer has for the norm before its channel mixer.
            links.same(f"{ours}.mixer_post_norm", f"{theirs}.feedforward_layer_norm")
            links.same(f"{ours}.channel_post_norm", f"{theirs}.post_feedforward_layernorm")
            parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
            continue
        links.same(f"{ours}.mixer_norm", f"{theirs}.attention_layer_norm")
        links.same(f"{ours}.channel_norm", f"{theirs}.feedforward_layer_norm")
        at, there = f"{ours}.mixer", f"{theirs}.linear_attn"
        links.named(at, there, ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "A_log", "dt_bias"))
        links.named(at, there, {"gate_proj": "g_proj", "norm": "o_norm", "out_proj": "o_proj"})
        for role in "qkv":
            links.convolution(f"{at}.conv.{role}", f"{there}.{role}_conv1d")


def _olmo_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    memory, attention = parts.first_of(blocks, "gated_delta_net"), parts.first_of(blocks, "attention")
    position = attention.position.to_dict()
    none = {"rope_type": "default", "rope_theta": None}
    found = {
        **parts.ends_settings(config), **memories.gated_delta_net_settings(memory, config.d_model), "hidden_act": "silu",
        "linear_allow_neg_eigval": memory.allow_neg_eigval, **parts.NO_TOKENS, "rms_norm_eps": blocks[0].norm.eps,
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.kv_heads,
        "attention_bias": attention.qkv_bias, "intermediate_size": blocks[0].channel_mixer.d_ff,
        "layer_types": [LINEAR if b.mixer.type == "gated_delta_net" else FULL for b in blocks],
        "rope_parameters": none if position["type"] == "none" else rope_settings(position),
    }
    return found if attention.head_dim is None else {**found, "head_dim": attention.head_dim}


# -- Kimi Linear -------------------------------------------------------------------------------------------------------


def first_dense(settings: Settings, first: int) -> list[bool]:
    """Whether each layer has experts; ``first``: how many at the start have none, where nothing is said."""
    return parts.sparse_layers(settings, settings.take("first_k_dense_replace", first, kind=int))


def _either(settings: Settings, *names: str, default: Any) -> Any:
    """A setting that has several names."""
    found = [settings.take(name, None) for name in names]
    return next((one for one in found if one is not None), default)


def deepseek_moe(settings: Settings, *, n_experts: int, d_ff: int, groups: tuple[int, int], scale: float) -> Table:
    """Experts chosen by sigmoids and a bias, within groups. The numbers are for what is not said."""
    settings.only("moe_router_activation_func", "sigmoid")
    settings.only("score_function", "sigmoid")
    settings.only("moe_layer_freq", 1)
    width = settings.count("moe_intermediate_size", d_ff)
    shared = _either(settings, "n_shared_experts", "num_shared_experts", default=1)
    table: Table = {
        "type": "moe", "d_ff": width,
        "n_experts": _either(settings, "num_experts", "num_local_experts", "n_routed_experts", default=n_experts),
        "top_k": _either(settings, "num_experts_per_token", "num_experts_per_tok", default=8),
        "d_ff_shared": shared * width, "scores": "sigmoid", "selection_bias": "balanced", "group_score": "top2",
        "normalize": _either(settings, "moe_renormalize", "norm_topk_prob", default=True),
        "routed_scale": settings.number("routed_scaling_factor", scale),
    }
    n_groups = _either(settings, "num_expert_group", "n_group", default=groups[0])
    chosen = settings.count("topk_group", groups[1])
    return table if n_groups == 1 else {**table, "n_groups": n_groups, "top_k_groups": chosen}


def _latent(settings: Settings, position: Table) -> Table:
    """Latent attention; the norms of its latents have an eps of their own."""
    n_heads = settings.count("num_attention_heads", 32)
    settings.only("num_key_value_heads", n_heads)
    settings.passed_over("head_dim", "qk_head_dim")
    rank = settings.take("q_lora_rank", None, kind=int)
    table: Table = {
        "type": "mla", "n_heads": n_heads, "kv_lora_rank": settings.count("kv_lora_rank", 512),
        "qk_nope_head_dim": settings.count("qk_nope_head_dim", 128), "qk_rope_head_dim": settings.count("qk_rope_head_dim", 64),
        "v_dim": settings.count("v_head_dim", 128), "position": position,
    }
    if settings.flag("attention_bias", False):
        table["bias"] = True
    return table if rank is None else {**table, "q_lora_rank": rank}


def _kimi_kinds(settings: Settings, said: Settings) -> list[str]:
    """By ``layer_types``, by the two lists of layers (counted from 1) of the published file, or every fourth."""
    n = settings.count("num_hidden_layers", 27)
    full, kda = said.take("full_attn_layers", None, kind=list), said.take("kda_layers", None, kind=list)
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(n)]
    if full is not None and kda is not None:
        default = [FULL if i + 1 in full else LINEAR if i + 1 in kda else "none" for i in range(n)]
    return parts.kinds(settings, (LINEAR, FULL), default)


def _kimi(settings: Settings) -> Table:
    norm, said = parts.norm(settings, default=1e-5), settings.inner("linear_attn_config")
    kinds, sparse = _kimi_kinds(settings, said), first_dense(settings, 1)
    settings.only("hidden_act", "silu")
    settings.only("mla_use_nope", True)
    settings.only("num_nextn_predict_layers", 0)
    settings.passed_over("rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk")
    memory = {
        "type": "kda", "n_heads": said.count("num_heads", settings.count("linear_num_heads", 32)),
        "head_dim": said.count("head_dim", settings.count("linear_head_dim", 128)),
        "d_conv": said.count("short_conv_kernel_size", settings.count("linear_conv_kernel_dim", 4)), "eps": norm["eps"],
    }
    dense = parts.gated(settings, settings.count("intermediate_size", 9216))
    experts = deepseek_moe(settings, n_experts=256, d_ff=1024, groups=(1, 1), scale=2.446)
    mixers = {LINEAR: memory, FULL: _latent(settings, {"type": "none"})}
    layers = [
        {"mixer": mixers[kind], "channel_mixer": experts if sparse[i] else dense, "norm": norm} for i, kind in enumerate(kinds)
    ]
    ends = parts.ends(settings, tied=False)
    length = _either(settings, "model_max_length", "max_position_embeddings", default=1048576)
    return {**ends, "max_seq_len": length, "final_norm": norm, **stack_of(layers)}


def _link_kimi(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config):
        if block.mixer.type == "kda":
            memories.link_kda(links, f"{ours}.mixer", f"{theirs}.self_attn")
            rates, heads = f"{ours}.mixer.A_log", block.mixer.value_heads
            links.turned(rates, f"{theirs}.self_attn.A_log", Tensor.flatten, lambda x, n=heads: x.view(1, 1, n, 1))  # type: ignore[misc]
        else:
            link_latent(links, f"{ours}.mixer", f"{theirs}.self_attn")
        parts.link_channel(
            links, f"{ours}.channel_mixer", f"{theirs}.block_sparse_moe", block.channel_mixer, dense=f"{theirs}.mlp",
            gates=("w1", "w3", "w2"),
        )


def _kda_settings(config: LanguageModelConfig) -> Table:
    """What Kimi Linear and Bailing Hybrid say alike."""
    blocks = parts.blocks_of(config)
    memory, latent = parts.first_of(blocks, "kda"), parts.first_of(blocks, "mla")
    sparse = [hasattr(b.channel_mixer, "n_experts") for b in blocks]
    found = {
        **parts.ends_settings(config), **parts.NO_TOKENS, "hidden_act": "silu", "rms_norm_eps": blocks[0].norm.eps,
        **latent_settings(latent),
        "linear_num_heads": memory.n_heads, "linear_head_dim": memory.head_dim, "linear_conv_kernel_dim": memory.d_conv,
        "layer_types": [LINEAR if b.mixer.type == "kda" else FULL for b in blocks],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
    }
    if not all(sparse):
        found["intermediate_size"] = blocks[sparse.index(False)].channel_mixer.d_ff
    return found | _deepseek_settings(blocks[sparse.index(True)].channel_mixer) if any(sparse) else found


def _deepseek_settings(moe: Any) -> Table:
    return {
        "moe_intermediate_size": moe.d_ff, "num_experts": moe.n_experts, "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.d_ff_shared // moe.d_ff, "num_expert_group": moe.n_groups, "topk_group": moe.top_k_groups,
        "moe_renormalize": moe.normalize, "routed_scaling_factor": moe.routed_scale,
    }


def _kimi_settings(config: LanguageModelConfig) -> Table:
    found = _kda_settings(config)
    found["model_max_length"] = found.pop("max_position_embeddings")
    return found


# -- Bailing Hybrid ----------------------------------------------------------------------------------------------------


def _bailing(settings: Settings) -> Table:
    norm, n_heads = parts.norm(settings), settings.count("num_attention_heads", 32)
    n, period = settings.count("num_hidden_layers", 42), settings.count("layer_group_size", 6)
    kinds, sparse = parts.kinds(settings, (LINEAR, FULL), memories.every_other(n, period)), first_dense(settings, 2)
    settings.only("hidden_act", "silu")
    settings.passed_over("mtp_loss_scaling_factor", "num_nextn_predict_layers", "num_mtp_layers")
    width, taps = settings.count("head_dim", 128), settings.count("short_conv_kernel_size", 4)
    memory: Table = {
        "type": "kda", "n_heads": settings.count("linear_num_heads", n_heads), "low_rank": False, "eps": norm["eps"],
        "head_dim": settings.count("linear_head_dim", width), "d_conv": settings.count("linear_conv_kernel_dim", taps),
    }
    floor = settings.number("kda_lower_bound", -5.0)
    if settings.flag("kda_safe_gate", True):
        memory["decay_floor"] = floor
    position = {**rope(settings, theta=6e6, fraction=1.0), "interleaved": True}
    position.pop("fraction", None)  # transformers and the published model turn all of these channels, whatever the file says
    dense = parts.gated(settings, settings.count("intermediate_size", 6144))
    experts = deepseek_moe(settings, n_experts=512, d_ff=768, groups=(8, 4), scale=2.5)
    mixers = {LINEAR: memory, FULL: {**_latent(settings, position), "head_gate": True}}
    layers = [
        {"mixer": mixers[kind], "channel_mixer": experts if sparse[i] else dense, "norm": norm} for i, kind in enumerate(kinds)
    ]
    length = _either(settings, "model_max_length", "max_position_embeddings", default=262144)
    return {**parts.ends(settings, tied=False), "max_seq_len": length, "final_norm": norm, **stack_of(layers)}


def _link_bailing(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, embedding="word_embeddings")
    links.further(f"model.layers.{len(config.layers())}.")  # a layer more, which tells the token after the next
    for block, ours, theirs in parts.each_layer(links, config):
        at, there = f"{ours}.mixer", f"{theirs}.attention"
        if block.mixer.type == "kda":
            memories.link_kda(links, at, there, out="dense")
            links.same(f"{at}.A_log", f"{there}.A_log")
        else:
            link_latent(links, at, there, "dense")
            links.same(f"{at}.gate_proj", f"{there}.g_proj")
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer, bias="gate.expert_bias")


def _bailing_settings(config: LanguageModelConfig) -> Table:
    found, blocks = _kda_settings(config), parts.blocks_of(config)
    memory = parts.first_of(blocks, "kda")
    found["model_max_length"] = found.pop("max_position_embeddings")
    found |= {
        "head_dim": memory.head_dim, "short_conv_kernel_size": memory.d_conv, "kda_safe_gate": memory.decay_floor is not None,
        "num_nextn_predict_layers": 0,
    }
    return found if memory.decay_floor is None else {**found, "kda_lower_bound": memory.decay_floor}


FAMILIES = (
    Family("olmo_hybrid", "OlmoHybridForCausalLM", _olmo, _link_olmo, _olmo_settings),
    Family("bailing_hybrid", "BailingHybridForCausalLM", _bailing, _link_bailing, _bailing_settings),
    Family("kimi_linear", "KimiLinearForCausalLM", _kimi, _link_kimi, _kimi_settings),
)
