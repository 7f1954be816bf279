"""Gemma 4, its text models: layers that share keys and values, embeddings of each token for each layer, experts beside a dense
unit.

A layer with such an embedding is two of ours: attention and channel mixer, then ``edge_gate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.families import parts
from hybridtf.interop.families.gemma import FULL, LOCAL, SANDWICH
from hybridtf.interop.family import Family, Table
from hybridtf.interop.positions import rope, rope_settings
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

GELU = "gelu_pytorch_tanh"
GROUPS = {LOCAL: "near", FULL: "far"}
"""What the layers that share keys and values are called in a recipe, by kind."""
POSITIONS = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
OWN = ("k_proj", "v_proj", "k_norm", "v_norm")
"""What a checkpoint may hold of a layer that has the keys and values of another, and transformers passes over as well."""


# -- settings ----------------------------------------------------------------------------------------------------------


def kinds_of(settings: Settings, every: int) -> list[str]:
    """The kind of attention of each layer; one in ``every`` is full where the settings do not say."""
    near = parts.near_layers(settings, lambda i: (i + 1) % every == 0)
    return [LOCAL if one else FULL for one in near]


def shared_of(settings: Settings, kinds: Sequence[str], default: int) -> list[Table]:
    """Whose keys and values each layer attends to: the last layers have those of the last one before them of their kind."""
    n, last = len(kinds), settings.take("num_kv_shared_layers", default, kind=int)
    if not last:
        return [{}] * n
    own = list(kinds[: n - last])
    if set(own) != set(kinds):
        raise CheckpointError(f"{settings.where}: num_kv_shared_layers is {last}, and the layers before are not of all kinds")
    givers = {n - last - 1 - own[::-1].index(kind) for kind in set(kinds)}
    roles = ["gives" if i in givers else "reads" if i >= n - last else None for i in range(n)]
    return [
        {"kv_group": GROUPS[kind], "kv_role": role} if role else {} for kind, role in zip(kinds, roles, strict=True)
    ]


def attention_of(settings: Settings, shared: Table, *, n_kv_heads: int, head_dim: int, values: str = "own") -> Table:
    """Attention of one layer, without its window and position; ``values``: what they are made from."""
    norm, n_heads = parts.norm(settings), settings.count("num_attention_heads", 8)
    table: Table = {"type": "attention", "n_heads": n_heads, "n_kv_heads": n_kv_heads, "scale": 1.0, "qk_norm": norm, **shared}
    if n_heads * head_dim != settings.count("hidden_size"):
        table["head_dim"] = head_dim
    table |= parts.biased(settings)
    if shared.get("kv_role") == "reads":
        return table
    return {**table, "v_norm": {**norm, "weight": False}, **({} if values == "own" else {"values_from": values})}


def ends_of(settings: Settings, cap: float | None, tied: bool = True) -> Table:
    """Ends of a model whose embedding is scaled and whose scores may be capped."""
    ends = parts.ends(settings, tied=tied)
    if cap is not None:
        ends["head"]["softcap"] = cap
    return {**ends, "stem": {"type": "token_embedding", "scale": "sqrt_d_model"}, "final_norm": parts.norm(settings)}


def layer_inputs(settings: Settings, default: int) -> Table:
    """The stem's option for embeddings of each layer; empty without them."""
    width = settings.take("hidden_size_per_layer_input", default, kind=int)
    size = settings.count("vocab_size_per_layer_input", 262144)
    if not width:
        return {}
    table = {"d_layer": width, "norm": parts.norm(settings)}
    return {"layer_inputs": table if size == settings.count("vocab_size") else {**table, "vocab_size": size}}


def _widths(settings: Settings, kinds: Sequence[str]) -> list[tuple[int, int]]:
    """Heads of keys and values and the width of a head, of each layer."""
    kv, width = settings.count("num_key_value_heads", 4), settings.count("head_dim", 256)
    far = {"head_dim": settings.count("global_head_dim", 512)}
    n_far = settings.count("num_global_key_value_heads", None)
    if n_far is not None and settings.flag("attention_k_eq_v", False):
        far["num_key_value_heads"] = n_far
    said = settings.take("per_layer_config", {i: far for i, kind in enumerate(kinds) if kind == FULL}, kind=dict)
    layers = {int(i): own for i, own in said.items() if str(i).isdecimal()}  # files say "05" where there are ten or more
    if len(layers) < len(said) or layers.keys() - set(range(len(kinds))):
        raise CheckpointError(f"{settings.where}: per_layer_config is of {sorted(said)}, and there are {len(kinds)} layers")
    found, known = [], {"head_dim", "num_key_value_heads"}
    for i in range(len(kinds)):
        own = layers.get(i, {})
        if set(own) - known:
            raise CheckpointError(f"{settings.where}: per_layer_config of layer {i} says {sorted(set(own) - known)}")
        found.append((own.get("num_key_value_heads", kv), own.get("head_dim", width)))
    return found


def _channel(settings: Settings, doubled: bool) -> Table:
    """The channel mixer of a layer, with the norms of its block where they are not those of the others."""
    dense = parts.gated(
        settings, settings.count("intermediate_size", 9216) * (2 if doubled else 1), act="hidden_activation", default=GELU
    )
    sparse = {name: settings.count(name, None) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if not settings.flag("enable_moe_block", False):
        return {"channel_mixer": dense}
    norm = parts.norm(settings)
    experts = {
        "type": "moe", "n_experts": sparse["num_experts"], "top_k": sparse["top_k_experts"],
        "d_ff": sparse["moe_intermediate_size"], "activation": dense.get("activation", "silu"), "router_norm": norm,
        "expert_norm": norm, "expert_scale": True, "logit_scale": settings.count("hidden_size") ** -0.5,
    }
    both = {"type": "parallel", "branches": [dense, experts], "in_norms": [norm, {"type": "none"}], "norm": norm}
    return {"channel_mixer": both, "channel_norm": {"type": "none"}}


def _gemma4(settings: Settings) -> Table:
    settings.only("use_bidirectional_attention", None, "vision", default=None)  # text is causal in both
    if "rope_parameters" not in settings:
        settings.values["rope_parameters"] = POSITIONS
    kinds = kinds_of(settings, 6)
    if kinds[-1] != FULL:
        raise CheckpointError(f"{settings.where}: the last of layer_types is {kinds[-1]}, and it has to be {FULL}")
    shared, widths, told = shared_of(settings, kinds, 0), _widths(settings, kinds), layer_inputs(settings, 256)
    if told.get("layer_inputs", {}).get("vocab_size", settings.count("vocab_size")) < settings.count("vocab_size"):
        raise CheckpointError(f"{settings.where}: vocab_size_per_layer_input is less than vocab_size")
    norm, like_keys = parts.norm(settings), settings.flag("attention_k_eq_v", False)
    position = {kind: rope(settings, theta=POSITIONS[kind]["rope_theta"], kind=kind) for kind in set(kinds)}  # type: ignore[arg-type]
    window = {"window": settings.count("sliding_window", 512)}
    wide, scale, layers = settings.flag("use_double_wide_mlp", False), {"stream_scale": "fixed"}, []
    for kind, group, (n_kv_heads, head_dim) in zip(kinds, shared, widths, strict=True):
        values = "keys" if like_keys and kind == FULL else "own"
        mixer = attention_of(settings, group, n_kv_heads=n_kv_heads, head_dim=head_dim, values=values)
        mixer |= {"position": position[kind], **(window if kind == LOCAL else {})}
        channel = _channel(settings, wide and group.get("kv_role") == "reads")
        layers.append({"type": "sandwich", "mixer": mixer, **channel, "norm": norm})
        if told:
            layers.append(gate_layer(settings, told["layer_inputs"]["d_layer"]))
        layers[-1] = {**layers[-1], **scale}
    table = ends_of(settings, parts.optional(settings, "final_logit_softcapping", None))
    return {**table, "stem": {**table["stem"], **told}, **stack_of(layers)}


def gate_layer(settings: Settings, width: int) -> Table:
    """The layer that reads the token's embedding of that layer."""
    gate = {"type": "edge_gate", "d_edge": width, "activation": parts.activation(settings, "hidden_activation", GELU)}
    return {"type": "output_norm", "channel_mixer": gate, "norm": parts.norm(settings)}


# -- weights -----------------------------------------------------------------------------------------------------------


def link_layer_inputs(links: WeightMap) -> None:
    """The embeddings of each layer, which are one tensor on both sides."""
    links.named("stem.layer_inputs", "model", {
        "embedding": "embed_tokens_per_layer", "proj": "per_layer_model_projection", "norm": "per_layer_projection_norm",
    })


def link_own_or_shared(links: WeightMap, ours: str, theirs: str) -> None:
    """Attention; what a checkpoint may hold of a layer without keys and values of its own stays unread."""
    parts.link_attention(links, f"{ours}.mixer", f"{theirs}.self_attn")
    if not links.has(f"{ours}.mixer.k_proj"):
        links.passed_over(*(f"{theirs}.self_attn.{name}." for name in OWN))


def link_gate(links: WeightMap, ours: str, theirs: str) -> None:
    """The layer that reads the token's embedding of that layer."""
    links.same(f"{ours}.channel_mixer.gate_proj", f"{theirs}.per_layer_input_gate")
    links.same(f"{ours}.channel_mixer.out_proj", f"{theirs}.per_layer_projection")
    links.same(f"{ours}.channel_post_norm", f"{theirs}.post_per_layer_input_norm")


def _link_experts(links: WeightMap, ours: str, theirs: str) -> None:
    dense, experts = (f"{ours}.branches.{i}" for i in range(2))
    parts.link_gated(links, dense, f"{theirs}.mlp")
    for one, other in (
        (f"{ours}.in_norms.0", "pre_feedforward_layernorm"), (f"{ours}.norms.0", "post_feedforward_layernorm_1"),
        (f"{ours}.norms.1", "post_feedforward_layernorm_2"), (f"{experts}.expert_norm", "pre_feedforward_layernorm_2"),
        (f"{experts}.router", "router.proj"), (f"{experts}.router_norm.weight", "router.scale"),
        (f"{experts}.expert_scale", "router.per_expert_scale"),
    ):
        links.same(one, f"{theirs}.{other}")
    parts.link_fused_experts(links, f"{experts}.experts", f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj")


def _link(links: WeightMap, config: LanguageModelConfig) -> None:
    parts.link_ends(links, config)
    link_layer_inputs(links)
    layer = -1
    for i, name in enumerate(config.layers()):
        block: Any = config.blocks[name]
        layer += block.mixer is not None
        ours, theirs = f"stack.layers.{i}", f"model.layers.{layer}"
        links.same(f"{ours}.stream_scale", f"{theirs}.layer_scalar")
        if block.mixer is None:
            link_gate(links, ours, theirs)
            continue
        links.named(ours, theirs, SANDWICH)
        link_own_or_shared(links, ours, theirs)
        if block.channel_mixer.type == "parallel":
            _link_experts(links, f"{ours}.channel_mixer", theirs)
        else:
            parts.link_gated(links, f"{ours}.channel_mixer", f"{theirs}.mlp")


# -- back --------------------------------------------------------------------------------------------------------------


def attending(config: LanguageModelConfig) -> list[Any]:
    """The blocks with attention, in order."""
    return [block for name in config.layers() if (block := config.blocks[name]).mixer is not None]  # type: ignore[attr-defined]


def common_settings(config: LanguageModelConfig) -> Table:
    """What Gemma 3n says alike."""
    blocks, stem, head = attending(config), config.stem, config.head
    mixers, told = [block.mixer for block in blocks], getattr(stem, "layer_inputs", None)
    near = [mixer.window for mixer in mixers if mixer.window is not None]
    kinds = [FULL if mixer.window is None else LOCAL for mixer in mixers]
    first = mixers[0]
    return {
        **parts.ends_settings(config), "num_hidden_layers": len(blocks), "rms_norm_eps": blocks[0].norm.eps,
        "num_attention_heads": first.n_heads, "num_key_value_heads": first.n_kv_heads, "attention_bias": first.qkv_bias,
        "head_dim": first.head_dim or config.d_model // first.n_heads, "layer_types": kinds,
        "sliding_window": near[0] if near else 512, "final_logit_softcapping": getattr(head, "softcap", None),
        "rope_parameters": {
            kind: rope_settings(mixer.position.to_dict()) for kind, mixer in zip(kinds, mixers, strict=True)
        },
        "num_kv_shared_layers": sum(mixer.kv_role == "reads" for mixer in mixers),
        "hidden_size_per_layer_input": 0 if told is None else told.d_layer,
        "vocab_size_per_layer_input": config.vocab_size if told is None else told.vocab_size or config.vocab_size,
    }


def _settings(config: LanguageModelConfig) -> Table:
    blocks = attending(config)
    mixers = [block.mixer for block in blocks]
    channels = [block.channel_mixer for block in blocks]
    dense = [channel.branches[0] if channel.type == "parallel" else channel for channel in channels]
    experts = channels[0].branches[1] if channels[0].type == "parallel" else None
    found = {
        **common_settings(config), "hidden_activation": parts.activation_name(dense[0].activation),
        "intermediate_size": dense[0].d_ff, "use_double_wide_mlp": dense[-1].d_ff == 2 * dense[0].d_ff,
        "attention_k_eq_v": any(mixer.values_from == "keys" for mixer in mixers), "use_bidirectional_attention": None,
        "enable_moe_block": experts is not None,
        "per_layer_config": {
            str(i): {"head_dim": mixer.head_dim or config.d_model // mixer.n_heads, "num_key_value_heads": mixer.n_kv_heads}
            for i, mixer in enumerate(mixers)
        },
    }
    if experts is not None:
        found |= {
            "num_experts": experts.n_experts, "top_k_experts": experts.top_k, "moe_intermediate_size": experts.d_ff,
        }
    return found


FAMILIES = (Family("gemma4_text", "Gemma4ForCausalLM", _gemma4, _link, _settings),)
