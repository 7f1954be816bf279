"""Latent attention to the tokens that an indexer chooses: DeepSeek-V3.2, GLM-5, A.X-K2, HY-V4."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hybridtf.interop.families import parts
from hybridtf.interop.families.latents import latent_settings
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig


def _model(
    settings: Settings, choices: list[str], *, interleaved: bool = False, eps: float = 1e-6, groups: tuple[int, int] = (1, 1),
    dense_first: int = 3, gate_rank: int = 0,
) -> Table:
    """``choices``: of each layer's indexer; ``interleaved``: its positions; ``eps``, ``groups`` of experts and those of them
    that are chosen, ``dense_first``: what the family takes where the settings do not say; ``gate_rank``: norms have gates, and
    so has attention.
    """
    n, norm = settings.count("num_hidden_layers"), parts.norm(settings, default=eps)
    settings.only("layer_types", ["indexed_attention"] * n)
    settings.only("mlp_bias", False)
    n_heads, told = settings.count("num_attention_heads"), settings.count("qk_rope_head_dim")
    settings.only("num_key_value_heads", n_heads)
    settings.only("head_dim", told)
    plain = settings.count("qk_nope_head_dim")
    settings.only("qk_head_dim", plain + told)
    position = rope(settings)
    mixer = {
        "type": "indexed_mla", "n_heads": n_heads, "q_lora_rank": settings.count("q_lora_rank"),
        "kv_lora_rank": settings.count("kv_lora_rank"), "qk_nope_head_dim": plain, "qk_rope_head_dim": told,
        "v_dim": settings.count("v_head_dim"), "position": {**position, "interleaved": True},
        "norm": {"type": "rms_norm", "eps": 1e-6}, "bias": settings.flag("attention_bias", False),
        "output_gate": "latent" if gate_rank else "none", "index_top_k": settings.count("index_topk", 2048),
    }
    indexer = {
        "index_n_heads": settings.count("index_n_heads"), "index_head_dim": settings.count("index_head_dim", 128),
        "index_position": {**position, "interleaved": interleaved},
    }
    gated = {**norm, "gate_rank": gate_rank} if gate_rank else norm
    dense, experts = parts.gated(settings, settings.count("intermediate_size")), _experts(settings, groups)
    layers = [
        {
            "mixer": {**mixer, "index_choice": choice, **({} if choice == "read" else indexer)},
            "channel_mixer": experts if sparse else dense, "norm": norm,
            **({"mixer_norm": gated, "channel_norm": gated if sparse else norm} if gate_rank else {}),
        }
        for choice, sparse in zip(choices, _sparse(settings, dense_first), strict=True)
    ]
    return parts.stack(settings, layers, norm)


def _sparse(settings: Settings, dense_first: int) -> list[bool]:
    """Whether each layer has experts."""
    first = settings.take("first_k_dense_replace", dense_first, kind=int)
    settings.only("moe_layer_freq", 1)
    return parts.sparse_layers(settings, first)


def _experts(settings: Settings, groups_of: tuple[int, int]) -> Table:
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    settings.passed_over("ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers")
    groups, chosen = settings.count("n_group", groups_of[0]), settings.count("topk_group", groups_of[1])
    width = settings.count("moe_intermediate_size")
    return {
        "type": "moe", "scores": "sigmoid", "selection_bias": "fixed", "d_ff": width, "activation": parts.activation(settings),
        "n_experts": settings.count("n_routed_experts", settings.take("num_experts", None)),
        "top_k": settings.count("num_experts_per_tok", 8), "normalize": settings.flag("norm_topk_prob", True),
        "d_ff_shared": width * settings.take("n_shared_experts", 1, kind=int),
        "routed_scale": settings.number("routed_scaling_factor", 2.5),
        **({"n_groups": groups, "top_k_groups": chosen, "group_score": "top2"} if groups > 1 else {}),
    }


def _deepseek(settings: Settings) -> Table:
    return _model(settings, ["own"] * settings.count("num_hidden_layers"), groups=(8, 4))


def _axk2(settings: Settings) -> Table:
    rank = settings.count("gated_norm_rank", 16)
    return _model(settings, ["own"] * settings.count("num_hidden_layers"), dense_first=1, gate_rank=rank)


def _glm(settings: Settings) -> Table:
    n = settings.count("num_hidden_layers")
    often, offset = settings.take("index_topk_freq", 1, kind=int), settings.take("index_skip_topk_offset", 2, kind=int)
    pattern: Any = settings.take("index_topk_pattern", None)
    said = ["full" if max(i - offset + 1, 0) % max(often, 1) == 0 else "shared" for i in range(n)]
    if pattern is not None:
        said = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    return _model(settings, _choices(settings, said), interleaved=True, eps=1e-5)


def _choices(settings: Settings, said: list[Any]) -> list[str]:
    """What each layer does with a choice, by the kind of its indexer; ``said``: where the settings do not say."""
    kinds = parts.kinds(settings, ("full", "shared"), said, "indexer_types")
    followed = [kind == "full" and after == "shared" for kind, after in zip(kinds, [*kinds[1:], "full"], strict=True)]
    return ["write" if read else "own" if kind == "full" else "read" for kind, read in zip(kinds, followed, strict=True)]


def _hy(settings: Settings) -> Table:
    n = settings.count("num_hidden_layers")
    settings.passed_over("learnable_sink_init")
    eps = settings.number("rms_norm_eps", 1e-5)
    said = ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(n)]
    table = _model(settings, _choices(settings, said), eps=1e-5, dense_first=1)
    streams = {
        "type": "mhc", "mixing": "none", "n_streams": settings.count("hc_mult", 4), "norm_eps": eps,
        "magnitude": settings.number("hc_magnitude", 2.0), "eps": settings.number("hc_eps", 1e-6),
    }
    limit = settings.number("swiglu_limit", 10.0)
    for block in table["blocks"].values():
        block |= streams
        position = {**block["mixer"]["position"], "interleaved": False}
        block["mixer"] |= {"output_gate": "input", "sinks": True, "position": position}
        if block["mixer"]["index_choice"] != "read":
            block["mixer"]["index_k_norm"] = {"type": "layer_norm", "eps": eps}
        if block["channel_mixer"]["type"] == "moe":
            block["channel_mixer"] |= {"limit": limit, "limit_shared": False}
    return {**table, "merge": {"type": "sigmoid", "eps": streams["eps"], "norm_eps": eps}}


_NAMES = {
    "q_a_proj": "q_a_proj", "q_a_norm": "q_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "kv_b_proj": "kv_b_proj", "out_proj": "o_proj", "indexer.q_proj": "indexer.wq_b",
    "indexer.k_proj": "indexer.wk", "indexer.k_norm": "indexer.k_norm", "indexer.weights_proj": "indexer.weights_proj",
}


def _link_mixer(links: WeightMap, ours: str, theirs: str, n_heads: int) -> None:
    """Queries and gates are one matrix there, head by head."""
    links.named(ours, theirs, _NAMES)
    if not links.has(f"{ours}.gate_proj"):
        return links.same(f"{ours}.q_b_proj", f"{theirs}.q_b_proj")
    return parts.link_grouped(links, [f"{ours}.q_b_proj", f"{ours}.gate_proj"], f"{theirs}.q_b_proj", n_heads)


def _link_norm(links: WeightMap, ours: str, theirs: str) -> None:
    """A norm, with its gate where it has one."""
    if not links.has(f"{ours}.gate"):
        return links.same(ours, theirs)
    links.same(f"{ours}.weight", f"{theirs}.norm.weight")
    links.same(f"{ours}.gate.down_proj", f"{theirs}.W_down")
    return links.same(f"{ours}.gate.up_proj", f"{theirs}.W_up")


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    for block, ours, theirs in parts.each_layer(links, config, {}):
        _link_norm(links, f"{ours}.mixer_norm", f"{theirs}.input_layernorm")
        _link_norm(links, f"{ours}.channel_norm", f"{theirs}.post_attention_layernorm")
        _link_mixer(links, f"{ours}.mixer", f"{theirs}.self_attn", block.mixer.n_heads)
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer)
    links.further(f"model.layers.{len(config.layers())}.")  # predicts the token after the next


def _deepseek_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mixer = next(block.mixer for block in blocks if block.mixer.index_choice != "read")
    moe = next(block.channel_mixer for block in blocks if block.channel_mixer.type == "moe")
    dense = next((block.channel_mixer for block in blocks if block.channel_mixer.type != "moe"), moe)
    return {
        **parts.ends_settings(config), **latent_settings(mixer), "rms_norm_eps": blocks[0].norm.eps,
        "head_dim": mixer.qk_rope_head_dim, "index_n_heads": mixer.index_n_heads, "index_head_dim": mixer.index_head_dim,
        "index_topk": mixer.index_top_k, "intermediate_size": dense.d_ff, "hidden_act": parts.activation_name(moe.activation),
        "mlp_layer_types": ["sparse" if block.channel_mixer.type == "moe" else "dense" for block in blocks],
        **parts.expert_settings(moe),
    }


def _glm_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    kinds = ["shared" if block.mixer.index_choice == "read" else "full" for block in blocks]
    return {**_deepseek_settings(config), "indexer_types": kinds}


def _axk2_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    return {**_deepseek_settings(config), "gated_norm_rank": block.mixer_norm.gate_rank}


def _link_hy(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    parts.link_streams(links, "stack.merge.streams", "model.hc_pre.hc_head.hc_head_")
    for block, ours, theirs in parts.each_layer(links, config):
        parts.link_streams(links, f"{ours}.mixer_streams", f"{theirs}.hc_pre.hc_attn_layer.hc_")
        parts.link_streams(links, f"{ours}.channel_streams", f"{theirs}.hc_pre.hc_mlp_layer.hc_")
        _link_hy_mixer(links, f"{ours}.mixer", f"{theirs}.self_attn", block.mixer)
        unit = partial(parts.link_gated, gate="linear_gate")
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer, fused=True, unit=unit)


def _link_hy_mixer(links: WeightMap, ours: str, theirs: str, mixer: Any) -> None:
    """The indexer tells positions on its last channels there, and on its first here."""
    for one, other in {**_NAMES, "q_b_proj": "q_b_proj", "gate_proj": "linear_gate", "sinks": "learnable_sink_param"}.items():
        if not one.startswith("indexer.") or one == "indexer.weights_proj":
            links.same(f"{ours}.{one}", f"{theirs}.{other}")
            continue
        for rest in (".weight", ".bias"):
            if links.has(f"{ours}.{one}{rest}"):
                width, told = mixer.index_head_dim, mixer.qk_rope_head_dim
                links.turned(
                    f"{ours}.{one}{rest}", f"{theirs}.{other}{rest}",
                    partial(_rolled, width=width, by=told), partial(_rolled, width=width, by=-told),
                )


def _rolled(x: Tensor, width: int, by: int) -> Tensor:
    """Channels of heads of that width, moved on."""
    rolled: Tensor = x.unflatten(0, (-1, width)).roll(by, 1).flatten(0, 1)
    return rolled


def _hy_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    moe = next(block.channel_mixer for block in parts.blocks_of(config) if block.channel_mixer.type == "moe")
    return {
        **_glm_settings(config), "hc_mult": block.n_streams, "hc_magnitude": block.magnitude, "hc_eps": block.eps,
        "swiglu_limit": moe.limit, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }


FAMILIES = (
    Family("deepseek_v32", "DeepseekV32ForCausalLM", _deepseek, _link, _deepseek_settings),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", _glm, _link, _glm_settings),
    Family("axk2", "AXK2ForCausalLM", _axk2, _link, _axk2_settings),
    Family("hy_v4", "HYV4ForCausalLM", _hy, _link_hy, _hy_settings),
)
