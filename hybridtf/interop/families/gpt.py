"""Layer norms and plain channel mixers: GPT-2, GPT-NeoX, GPT-J, Phi, Falcon, BLOOM, MPT, OPT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.decoders import heads
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

TRAINING = (
    "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "emb_pdrop", "gradient_checkpointing", "hidden_dropout",
    "init_device", "init_std", "layerdrop", "n_ctx", "prefix", "resid_pdrop", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class", "tokenizer_name",
    "unk_token_id",
)
"""Settings of training, of heads that classify, and of tokenizers."""

OLD = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer"}
"""How GPT-2 and GPT-J call sizes."""


def plain_ends(settings: Settings, names: Mapping[str, str], *, tied: bool, bias: bool = False) -> Table:
    """Sizes, called by ``names`` where that is not as usual, and the head."""
    settings.passed_over(*TRAINING)
    head = {"type": "lm_head", "tied": settings.flag("tie_word_embeddings", tied)}
    return {
        "vocab_size": settings.count("vocab_size"), "d_model": settings.count(names.get("hidden_size", "hidden_size")),
        "max_seq_len": settings.count(names.get("max_position_embeddings", "max_position_embeddings"), 2048),
        "head": {**head, "bias": True} if bias else head,
    }


def _renamed(config: LanguageModelConfig, names: Mapping[str, str]) -> Table:
    return {names.get(name, name): value for name, value in parts.ends_settings(config).items()}


def plain_norm(settings: Settings, name: str, *, bias: bool = True) -> Table:
    table: Table = {"type": "layer_norm", "eps": settings.number(name, 1e-5)}
    return table if bias else {**table, "bias": False}


def plain_mlp(settings: Settings, d_ff: int, act: str, default: str, *, bias: bool = True) -> Table:
    table: Table = {"type": "mlp", "d_ff": d_ff, "activation": parts.activation(settings, act, default)}
    return {**table, "bias": True} if bias else table


def with_biases(attention: Table, bias: bool = True) -> Table:
    return {**attention, "qkv_bias": True, "out_bias": True} if bias else attention


def link_layers(
    links: WeightMap, config: LanguageModelConfig, prefix: str, names: Mapping[str, str], qkv: str | None = None,
    buffers: tuple[str, ...] = (),
) -> None:
    """Modules of each layer by ``names``, ours and theirs; ``qkv``: the one matrix of queries, keys and values; ``buffers``:
    masks and frequencies that older files hold."""
    for block, ours, theirs in parts.each_layer(links, config, names, prefix=prefix):
        links.passed_over(*(f"{theirs}.{name}" for name in buffers))
        if qkv is not None:
            roles = [f"{ours}.mixer.{role}_proj" for role in "qkv"]
            parts.link_grouped(links, roles, f"{theirs}.{qkv}", block.mixer.n_kv_heads or block.mixer.n_heads)


# -- GPT-2 -------------------------------------------------------------------------------------------------------------


def _gpt2(settings: Settings) -> Table:
    ends, n_heads = plain_ends(settings, OLD, tied=True), settings.count("n_head")
    settings.only("add_cross_attention", False)
    settings.passed_over("reorder_and_upcast_attn")  # the same scores, rounded elsewhere
    scaled, by_layer = settings.flag("scale_attn_weights", True), settings.flag("scale_attn_by_inverse_layer_idx", False)
    norm = plain_norm(settings, "layer_norm_epsilon")
    channel = plain_mlp(settings, settings.count("n_inner", 4 * ends["d_model"]), "activation_function", "gelu_new")
    usual = (ends["d_model"] // n_heads) ** -0.5
    layers = []
    for i in range(settings.count("n_layer")):
        scale = (usual if scaled else 1.0) / (i + 1 if by_layer else 1)
        attention = with_biases({"type": "attention", "n_heads": n_heads, "position": {"type": "none"}})
        layers.append({
            "mixer": attention if scale == usual else {**attention, "scale": scale}, "channel_mixer": channel, "norm": norm,
        })
    stem = {"type": "token_embedding", "position": {"type": "learned"}}
    return {**ends, "stem": stem, "final_norm": norm, **stack_of(layers)}


def _link_gpt2(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="wte", norm="ln_f")
    links.same("stem.position.table", "transformer.wpe.weight")
    for _, ours, theirs in parts.each_layer(links, config, ("ln_1", "ln_2"), prefix="transformer.h"):
        links.passed_over(f"{theirs}.attn.bias", f"{theirs}.attn.masked_bias")
        roles, qkv = [f"{ours}.mixer.{role}_proj" for role in "qkv"], f"{theirs}.attn.c_attn"
        links.link([f"{role}.weight" for role in roles], [f"{qkv}.weight"], _columns_as_rows, _rows_as_columns)
        links.fused([f"{role}.bias" for role in roles], f"{qkv}.bias")
        for one, other in (
            ("mixer.out_proj", "attn.c_proj"), ("channel_mixer.up_proj", "mlp.c_fc"), ("channel_mixer.down_proj", "mlp.c_proj"),
        ):
            links.turned(f"{ours}.{one}.weight", f"{theirs}.{other}.weight", lambda x: x.mT, lambda x: x.mT)
            links.same(f"{ours}.{one}.bias", f"{theirs}.{other}.bias")


def _columns_as_rows(x: list[Tensor]) -> list[Tensor]:
    return list(x[0].mT.chunk(3))


def _rows_as_columns(x: list[Tensor]) -> list[Tensor]:
    return [torch.cat(x).mT]


def _gpt2_settings(config: LanguageModelConfig) -> Table:
    blocks = parts.blocks_of(config)
    mixer, channel = blocks[0].mixer, blocks[0].channel_mixer
    return {
        **_renamed(config, OLD), "n_head": mixer.n_heads, "n_inner": channel.d_ff,
        "activation_function": parts.activation_name(channel.activation), "layer_norm_epsilon": blocks[0].norm.eps,
        "scale_attn_weights": mixer.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len(blocks) > 1 and blocks[1].mixer.scale != mixer.scale,
    }


# -- GPT-NeoX ----------------------------------------------------------------------------------------------------------


def _gpt_neox(settings: Settings) -> Table:
    norm = plain_norm(settings, "layer_norm_eps")
    theta, fraction = settings.number("rotary_emb_base", 10000.0), settings.number("rotary_pct", 0.25)
    settings.only("rope_theta", theta)  # only the older names count
    settings.only("partial_rotary_factor", fraction)
    attention = {
        "type": "attention", "n_heads": settings.count("num_attention_heads"),
        "position": rope(settings, theta=theta, fraction=fraction),
    }
    block = {
        "type": "parallel" if settings.flag("use_parallel_residual", True) else "prenorm", "norm": norm,
        "mixer": with_biases(attention, settings.flag("attention_bias", True)),
        "channel_mixer": plain_mlp(settings, settings.count("intermediate_size"), "hidden_act", "gelu"),
    }
    ends = plain_ends(settings, {}, tied=False)
    return {**ends, "final_norm": norm, **stack_of([block] * settings.count("num_hidden_layers"))}


def _link_gpt_neox(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="gpt_neox", embedding="embed_in", norm="final_layer_norm", head="embed_out")
    names = {
        "mixer_norm": "input_layernorm", "channel_norm": "post_attention_layernorm", "mixer.out_proj": "attention.dense",
        "channel_mixer.up_proj": "mlp.dense_h_to_4h", "channel_mixer.down_proj": "mlp.dense_4h_to_h",
    }
    buffers = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")
    link_layers(links, config, "gpt_neox.layers", names, "attention.query_key_value", buffers)


def _gpt_neox_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    return {
        **parts.ends_settings(config), "num_attention_heads": block.mixer.n_heads,
        "intermediate_size": block.channel_mixer.d_ff, "layer_norm_eps": block.norm.eps,
        "hidden_act": parts.activation_name(block.channel_mixer.activation),
        "attention_bias": block.mixer.qkv_bias, "use_parallel_residual": block.type == "parallel",
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope_settings(block.mixer.position.to_dict())},
    }


# -- GPT-J -------------------------------------------------------------------------------------------------------------


def _gptj(settings: Settings) -> Table:
    ends, n_heads = plain_ends(settings, OLD, tied=False, bias=True), settings.count("n_head")
    norm = plain_norm(settings, "layer_norm_epsilon")
    settings.only("rotary", True)
    settings.only("scale_attn_weights", True)
    if settings.values.get("rotary_dim", 64) is None:
        raise CheckpointError(f"{settings.where}: rotary_dim is null: rotations over the width of the model are not known here")
    width, turned = ends["d_model"] // n_heads, settings.count("rotary_dim", 64)
    position: Table = {"type": "rope", "interleaved": True, "fraction": turned / width}
    block = {
        "type": "parallel", "shared_norm": True, "norm": norm,
        "mixer": {"type": "attention", "n_heads": n_heads, "position": position},
        "channel_mixer": plain_mlp(settings, settings.count("n_inner", 4 * ends["d_model"]), "activation_function", "gelu_new"),
    }
    return {**ends, "final_norm": norm, **stack_of([block] * settings.count("n_layer"))}


def _link_gptj(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, prefix="transformer", embedding="wte", norm="ln_f")
    names = {
        "mixer_norm": "ln_1", **{f"mixer.{role}_proj": f"attn.{role}_proj" for role in ("q", "k", "v", "out")},
        "channel_mixer.up_proj": "mlp.fc_in", "channel_mixer.down_proj": "mlp.fc_out",
    }
    link_layers(links, config, "transformer.h", names, buffers=("attn.bias", "attn.masked_bias", "attn.embed_positions"))


def _gptj_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    width = config.d_model // block.mixer.n_heads
    return {
        **_renamed(config, OLD), "n_head": block.mixer.n_heads, "n_inner": block.channel_mixer.d_ff,
        "activation_function": parts.activation_name(block.channel_mixer.activation), "layer_norm_epsilon": block.norm.eps,
        "rotary_dim": round(width * block.mixer.position.fraction),
    }


# -- Phi ---------------------------------------------------------------------------------------------------------------


def _phi(settings: Settings) -> Table:
    norm = plain_norm(settings, "layer_norm_eps")
    attention = {**heads(settings), "position": rope(settings, fraction=0.5)}
    block = {
        "type": "parallel", "shared_norm": True, "norm": norm,
        "mixer": with_biases({**attention, "qk_norm": norm} if settings.flag("qk_layernorm", False) else attention),
        "channel_mixer": plain_mlp(settings, settings.count("intermediate_size"), "hidden_act", "gelu_new"),
    }
    ends = plain_ends(settings, {}, tied=False, bias=True)
    return {**ends, "final_norm": norm, **stack_of([block] * settings.count("num_hidden_layers"))}


def _link_phi(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config, norm="final_layernorm")
    names = {
        "mixer_norm": "input_layernorm", **{f"mixer.{role}_proj": f"self_attn.{role}_proj" for role in "qkv"},
        "mixer.out_proj": "self_attn.dense", "mixer.q_norm": "self_attn.q_layernorm", "mixer.k_norm": "self_attn.k_layernorm",
        "channel_mixer.up_proj": "mlp.fc1", "channel_mixer.down_proj": "mlp.fc2",
    }
    link_layers(links, config, "model.layers", names)


def _phi_settings(config: LanguageModelConfig) -> Table:
    block = parts.first_block(config)
    mixer = block.mixer
    return {
        **parts.ends_settings(config), "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads or mixer.n_heads, "intermediate_size": block.channel_mixer.d_ff,
        "hidden_act": parts.activation_name(block.channel_mixer.activation), "layer_norm_eps": block.norm.eps,
        "qk_layernorm": mixer.qk_norm is not None,
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope_settings(mixer.position.to_dict())},
        **({} if mixer.head_dim is None else {"head_dim": mixer.head_dim}),
    }


FAMILIES = (
    Family("gpt2", "GPT2LMHeadModel", _gpt2, _link_gpt2, _gpt2_settings, prefix="transformer."),
    Family("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox, _link_gpt_neox, _gpt_neox_settings),
    Family("gptj", "GPTJForCausalLM", _gptj, _link_gptj, _gptj_settings),
    Family("phi", "PhiForCausalLM", _phi, _link_phi, _phi_settings),
)
