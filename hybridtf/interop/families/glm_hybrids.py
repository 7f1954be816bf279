"""GLM-5-Next, its text: Kimi Delta Attention and indexed latent attention on several streams.

The tower for pictures is left unread: the scores of a text are the same without it. An export has an empty one.
"""

from __future__ import annotations

from hybridtf.core import CheckpointError
from hybridtf.interop.families import memories, parts
from hybridtf.interop.families.delta import deepseek_moe, first_dense
from hybridtf.interop.families.latents import latent_settings, link_latent
from hybridtf.interop.families.memories import FULL, LINEAR
from hybridtf.interop.family import Family, Table
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

INDEXED = "indexed_attention"
_MARKS = [f"{kind}_{one}token_id" for kind in ("image", "video") for one in ("", "start_", "end_")]
_NO_PICTURES = {"depth": 0, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "projection_intermediate_size": 16}
"""A tower without layers; what little it has is not in the files, and transformers draws it."""


def _glm(settings: Settings) -> Table:
    settings.take("text_config", kind=dict)
    text = settings.inner("text_config")
    text.fill({"max_position_embeddings": 1048576})
    settings.passed_over("vision_config", *_MARKS)
    settings.only("tie_word_embeddings", False)
    norm, n = parts.norm(text, default=1e-5), text.count("num_hidden_layers", 45)
    kinds = parts.kinds(text, (LINEAR, INDEXED, FULL), [LINEAR if i % 4 != 3 else INDEXED for i in range(n)])
    choices, sparse = _choices(text, kinds), first_dense(text, 3)
    text.only("hidden_act", "silu")
    memory = _memory(text, norm["eps"])
    limit = text.number("swiglu_limit", 10.0)
    dense = {"type": "glu", "d_ff": text.count("intermediate_size", 12288), "activation": "silu", "limit": limit}
    experts = {**deepseek_moe(text, n_experts=288, d_ff=2048, groups=(1, 1), scale=2.5), "limit": limit}
    streams = parts.streams(text, norm)
    layers = [
        {
            **streams, "mixer": memory if choice is None else _indexed(text, norm, choice),
            "channel_mixer": experts if sparse[i] else dense,
        }
        for i, choice in enumerate(choices)
    ]
    return {**parts.ends(text, tied=False), "final_norm": norm, "merge": {"type": "mean"}, **stack_of(layers)}


def _memory(text: Settings, eps: float) -> Table:
    said = text.inner("linear_attn_config")
    said.only("safe_gate", True)
    floor = said.number("gate_lower_bound", text.number("linear_lower_bound", -5.0))
    unbound = "linear_lower_bound" in text.values and "linear_lower_bound" not in text and not said.values  # null is said
    table = {
        "type": "kda", "n_heads": said.count("num_heads", text.count("linear_num_heads", 64)), "eps": eps,
        "head_dim": said.count("head_dim", text.count("linear_head_dim", 128)),
        "d_conv": said.count("short_conv_kernel_size", text.count("linear_conv_kernel_dim", 4)),
    }
    return table if unbound else {**table, "decay_floor": floor}


def _choices(text: Settings, kinds: list[str]) -> list[str | None]:
    """What each layer does about the tokens it looks at: choose, choose and tell, be told; None for a memory."""
    n, pattern = len(kinds), text.take("index_topk_pattern", None)
    every, offset = text.count("index_topk_freq", 1), text.take("index_skip_topk_offset", 2, kind=int)
    default = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(n)]
    if pattern is not None:
        default = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    said = parts.kinds(text, ("full", "shared"), default, "indexer_types")
    told = [kind != LINEAR and one == "shared" for kind, one in zip(kinds, said, strict=True)]
    for i, one in enumerate(told):
        if one and (i == 0 or kinds[i - 1] == LINEAR):
            raise CheckpointError(f"{text.where}: indexer_types[{i}] is 'shared', and no indexer stands in the layer before it")
    return [
        None if kind == LINEAR else "read" if told[i] else "write" if told[i + 1 : i + 2] == [True] else "own"
        for i, kind in enumerate(kinds)
    ]


def _indexed(text: Settings, norm: Table, choice: str) -> Table:
    n_heads = text.count("num_attention_heads", 64)
    text.only("num_key_value_heads", n_heads)
    text.only("index_kpool_always_select_tail", True)
    text.passed_over("head_dim", "qk_head_dim")
    rope = text.take("qk_rope_head_dim", 0, kind=int)
    table: Table = {
        "type": "indexed_mla", "n_heads": n_heads, "q_lora_rank": text.count("q_lora_rank", 1536), "norm": norm,
        "kv_lora_rank": text.count("kv_lora_rank", 512), "qk_nope_head_dim": text.count("qk_nope_head_dim", 256),
        "qk_rope_head_dim": rope, "v_dim": text.count("v_head_dim", 256), "position": {"type": "none"},
        "index_position": {"type": "none"}, "index_top_k": text.count("index_topk", 2048),
        "index_pool": text.count("index_kpool", 16),
    }
    if text.flag("attention_bias", False):
        table["bias"] = True
    if choice != "own":
        table["index_choice"] = choice
    indexer = {"index_n_heads": text.count("index_n_heads", 32), "index_head_dim": text.count("index_head_dim", 128)}
    return table if choice == "read" else {**table, **indexer}


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    prefix = "model.language_model"
    parts.link_ends(links, config, prefix=prefix)
    links.passed_over("model.visual.")
    links.further(f"{prefix}.layers.{len(config.layers())}.")  # tells the token after the next
    for block, ours, theirs in parts.each_layer(links, config, prefix=f"{prefix}.layers"):
        parts.link_streams(links, f"{ours}.mixer_streams", f"{theirs}.hc_attn_")
        parts.link_streams(links, f"{ours}.channel_streams", f"{theirs}.hc_ffn_")
        at, there = f"{ours}.mixer", f"{theirs}.self_attn"
        if block.mixer.type == "kda":
            memories.link_kda(links, at, there)
            links.same(f"{at}.A_log", f"{there}.A_log")
        else:
            link_latent(links, at, there)
            _link_indexer(links, f"{at}.indexer", f"{there}.indexer")
        parts.link_channel(links, f"{ours}.channel_mixer", f"{theirs}.mlp", block.channel_mixer)


def _link_indexer(links: WeightMap, ours: str, theirs: str) -> None:
    links.named(ours, theirs, {
        "q_proj": "wq_b", "k_proj": "wk", "k_norm": "k_norm", "weights_proj": "weights_proj",
        "gate_proj.weight": "index_kpool_compress_gate", "gate_bias": "index_kpool_compress_ape",
    })


def _settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    memory, latent = parts.first_of(blocks, "kda"), parts.first_of(blocks, "indexed_mla")
    chooser = next(b.mixer for b in blocks if b.mixer.type == "indexed_mla" and b.mixer.index_choice != "read")
    sparse = [hasattr(b.channel_mixer, "n_experts") for b in blocks]
    moe = blocks[sparse.index(True)].channel_mixer
    text = {
        **parts.ends_settings(config), **parts.NO_TOKENS, "model_type": "glm5_next_text", "hidden_act": "silu",
        "rms_norm_eps": blocks[0].norm.eps, "linear_num_heads": memory.n_heads, "linear_head_dim": memory.head_dim,
        "linear_conv_kernel_dim": memory.d_conv, "linear_lower_bound": memory.decay_floor,
        **latent_settings(latent),
        "index_n_heads": chooser.index_n_heads, "index_head_dim": chooser.index_head_dim, "index_topk": chooser.index_top_k,
        "index_kpool": chooser.index_pool, "layer_types": [LINEAR if b.mixer.type == "kda" else INDEXED for b in blocks],
        "indexer_types": ["shared" if getattr(b.mixer, "index_choice", "own") == "read" else "full" for b in blocks],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse], "swiglu_limit": moe.limit,
        "hc_mult": blocks[0].n_streams, "hc_sinkhorn_iters": blocks[0].sinkhorn_iters, "hc_eps": blocks[0].eps,
        **parts.expert_settings(moe),
    }
    if not all(sparse):
        text["intermediate_size"] = blocks[sparse.index(False)].channel_mixer.d_ff
    pictures = {**_NO_PICTURES, "out_hidden_size": config.d_model}
    return {"text_config": text, "vision_config": pictures, "tie_word_embeddings": text.pop("tie_word_embeddings")}


FAMILIES = (Family("glm5_next", "Glm5NextForConditionalGeneration", _glm, _link, _settings),)
