"""What many families share: ends of a model, attention, channel mixers and Mamba layers, as settings and as links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.settings import Settings
from hybridtf.interop.stacks import stack_of
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "gelu_fast": "gelu_tanh",
}
"""Theirs by name, as ours."""

LARGEST = 3.4028234663852886e38
"""Of float32: a bound that no step of a scan passes, where a checkpoint says infinity, which recipes do not."""


NO_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""For families where transformers fills in the ids of a published vocabulary, which a smaller one does not have."""


def activation(settings: Settings, name: str = "hidden_act", default: str = "silu") -> str:
    """The activation that a setting names."""
    return ACTIVATIONS[settings.only(name, *ACTIVATIONS, default=default)]


def activation_name(ours: str) -> str:
    """How transformers calls it."""
    return {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}[ours]


def whole(number: float) -> float:
    """1.0 as 1: transformers refuses the former where it wants a whole number."""
    return int(number) if number == int(number) else number


def blocks_of(config: LanguageModelConfig) -> list[Any]:
    """The block of each layer, in order."""
    return [config.blocks[name] for name in config.layers()]


def first_block(config: LanguageModelConfig) -> Any:
    """The block of the first layer."""
    return blocks_of(config)[0]


def first_of(blocks: list[Any], mixer: str) -> Any:
    """The mixer of the first block that has one of this type. Raises StopIteration, which an export takes for a no."""
    return next(block.mixer for block in blocks if block.mixer is not None and block.mixer.type == mixer)


def norm(settings: Settings, name: str = "rms_norm_eps", default: float = 1e-6) -> dict[str, Any]:
    """A norm by root mean squares."""
    return {"type": "rms_norm", "eps": settings.number(name, default)}


def kinds(
    settings: Settings, known: Sequence[str], default: Sequence[str] | None = None, name: str = "layer_types"
) -> list[str]:
    """The kind of each layer, of those that are ``known``; ``default``: where it is not said, None if it has to be."""
    found: list[str] = settings.take(name, *([] if default is None else [list(default)]), kind=list)
    n = settings.count("num_hidden_layers")
    unknown = sorted({str(kind) for kind in found if kind not in known})
    if len(found) != n:
        raise CheckpointError(f"{settings.where}: {name} has {len(found)} entries for {n} layers")
    if unknown:
        raise CheckpointError(f"{settings.where}: {name} has {', '.join(unknown)}; known here: {', '.join(known)}")
    return found


def near_layers(settings: Settings, is_full: Callable[[int], bool], local: str = "sliding_attention") -> list[bool]:
    """Whether each layer sees only what is near: by ``layer_types``, else all that are not ``is_full``."""
    full = "full_attention"
    default = [full if is_full(i) else local for i in range(settings.count("num_hidden_layers"))]
    return [kind == local for kind in kinds(settings, (local, full), default)]


def sparse_layers(settings: Settings, dense_first: int) -> list[bool]:
    """Whether each layer has experts, by ``mlp_layer_types``; ``dense_first``: how many have none, where it is not there."""
    default = ["dense" if i < dense_first else "sparse" for i in range(settings.count("num_hidden_layers"))]
    return [kind == "sparse" for kind in kinds(settings, ("dense", "sparse"), default, "mlp_layer_types")]


def optional(settings: Settings, name: str, default: float | None) -> float | None:
    """A number, or None where the file says null; ``default`` where it says nothing."""
    return settings.number(name, None) if name in settings.values else default


def biased(settings: Settings, default: bool = False) -> dict[str, Any]:
    """Biases of all projections of attention, where ``attention_bias`` asks for them."""
    return {"qkv_bias": True, "out_bias": True} if settings.flag("attention_bias", default) else {}


def gated(
    settings: Settings, d_ff: int, *, bias: bool = False, act: str = "hidden_act", default: str = "silu"
) -> dict[str, Any]:
    """A gated channel mixer; the setting ``act`` names its activation, ``default`` where it does not."""
    kind = activation(settings, act, default)
    table: dict[str, Any] = {"type": "swiglu", "d_ff": d_ff}
    if kind != "silu":
        table = {"type": "glu", "d_ff": d_ff, "activation": kind}
    return {**table, "bias": True} if bias else table


def step_limit(settings: Settings, name: str = "time_step_limit") -> dict[str, Any]:
    """Between which two numbers the steps of Mamba-2 are held, where they are."""
    limit = settings.take(name, [0.0, math.inf], kind=list)
    if len(limit) != 2 or not all(isinstance(x, int | float) for x in limit):
        raise CheckpointError(f"{settings.where}: {name} is {limit!r}, and should be two numbers")
    return steps_between(*map(float, limit))


def without_step_limit(settings: Settings) -> None:
    """Refuses one: transformers passes it over in this family, and other code may not."""
    if step_limit(settings):
        limit = settings.take("time_step_limit")
        raise CheckpointError(f"{settings.where}: time_step_limit is {limit}; known here: [0, Infinity]")


def steps_between(low: float, high: float) -> dict[str, Any]:
    """The same of two numbers."""
    return {} if low <= 0.0 and math.isinf(high) else {"dt_limit": [low, min(high, LARGEST)]}


def limit_settings(limit: Sequence[float] | None) -> list[float]:
    """The numbers of a limit of ours."""
    return [0.0, math.inf] if limit is None else [limit[0], math.inf if limit[1] >= LARGEST else limit[1]]


def mamba2(settings: Settings, eps: float, inner: float | None = None) -> dict[str, Any]:
    """Mamba-2 as Bamba, Granite and Falcon-H1 say it; ``inner``: its width where they give one."""
    expand, n_heads = settings.number("mamba_expand", 2), settings.count("mamba_n_heads", 128)
    width = settings.take("mamba_d_head", "auto")
    inner = expand * settings.count("hidden_size") if inner is None else inner
    settings.passed_over("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor")
    return {
        "type": "mamba2", "d_state": settings.count("mamba_d_state", 256), "n_heads": n_heads, "eps": eps,
        "head_dim": int(inner) // n_heads if width == "auto" else width, "n_groups": settings.count("mamba_n_groups", 1),
        "d_conv": settings.count("mamba_d_conv", 4), "bias": settings.flag("mamba_proj_bias", False),
        "conv_bias": settings.flag("mamba_conv_bias", True), **step_limit(settings),
    }


def mamba2_settings(mamba: Any, d_model: int) -> dict[str, Any]:
    """The same as settings."""
    n_heads = mamba.n_heads or round(mamba.expand * d_model) // mamba.head_dim
    return {
        "mamba_d_state": mamba.d_state, "mamba_n_heads": n_heads, "mamba_d_head": mamba.head_dim,
        "mamba_expand": whole(n_heads * mamba.head_dim / d_model), "mamba_n_groups": mamba.n_groups,
        "mamba_d_conv": mamba.d_conv,
        "mamba_proj_bias": mamba.bias, "mamba_conv_bias": mamba.conv_bias, "mamba_chunk_size": 256,
        **({} if mamba.dt_limit is None else {"time_step_limit": limit_settings(mamba.dt_limit)}),
    }


def ends(settings: Settings, *, tied: bool) -> dict[str, Any]:
    """Sizes of a language model and whether its head is the embedding."""
    return {
        "vocab_size": settings.count("vocab_size"), "d_model": settings.count("hidden_size"),
        "max_seq_len": settings.count("max_position_embeddings", 2048),
        "head": {"type": "lm_head", "tied": settings.flag("tie_word_embeddings", tied)},
    }


def stack(
    settings: Settings, layers: Sequence[dict[str, Any]], final: dict[str, Any], *, tied: bool = False
) -> dict[str, Any]:
    """A model of these layers and of this final norm."""
    return {**ends(settings, tied=tied), "final_norm": final, **stack_of(layers)}


def alike(settings: Settings, block: dict[str, Any], final: dict[str, Any], *, tied: bool = False) -> dict[str, Any]:
    """A model whose layers are all alike."""
    return stack(settings, [block] * settings.count("num_hidden_layers"), final, tied=tied)


def streams(settings: Settings, norm: dict[str, Any]) -> dict[str, Any]:
    """The options of a block with manifold-constrained hyper-connections; ``norm``: its norms."""
    return {
        "type": "mhc", "n_streams": settings.count("hc_mult", 4), "eps": settings.number("hc_eps", 1e-6),
        "sinkhorn_iters": settings.count("hc_sinkhorn_iters", 20), "norm_eps": norm["eps"], "norm": norm,
    }


def scaled(table: dict[str, Any], embedding: float, scores: float) -> dict[str, Any]:
    """A table of :func:`ends` whose embedding and scores are multiplied."""
    stem = {} if embedding == 1.0 else {"stem": {"type": "token_embedding", "scale": embedding}}
    return {**table, **stem, "head": table["head"] if scores == 1.0 else {**table["head"], "scale": scores}}


def undone(wanted: float, first: float, of: Callable[[float], float]) -> float:
    """The number that a formula makes ``wanted`` of, to the last bit where there is one: ``first`` or a neighbour of it."""
    near = [first, math.nextafter(first, math.inf), math.nextafter(first, -math.inf)]
    return next((x for x in near if of(x) == wanted), first)


def ends_settings(config: LanguageModelConfig) -> dict[str, Any]:
    """The same as settings."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": bool(getattr(config.head, "tied", True)), "num_hidden_layers": len(config.layers()),
    }


def window_settings(config: LanguageModelConfig, local: str = "sliding_attention") -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``, null where no layer has one."""
    sizes = [block.mixer.window for block in blocks_of(config)]
    kinds = ["full_attention" if one is None else local for one in sizes]
    return {"sliding_window": next((one for one in sizes if one is not None), None), "layer_types": kinds}


def expert_settings(moe: Any) -> dict[str, Any]:
    """Experts within groups, and shared ones, as DeepSeek's settings say them."""
    return {
        "n_routed_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "n_shared_experts": moe.d_ff_shared // moe.d_ff, "n_group": moe.n_groups, "topk_group": moe.top_k_groups,
        "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.routed_scale,
    }


PRENORM = {"mixer_norm": "input_layernorm", "channel_norm": "post_attention_layernorm"}


def each_layer(
    links: WeightMap, config: LanguageModelConfig, names: Mapping[str, str] | tuple[str, str] = PRENORM, *,
    prefix: str = "model.layers",
) -> Iterator[tuple[Any, str, str]]:
    """Of each layer its block, and where it stands: here and there. ``names``: modules of a layer to be linked, theirs of ours,
    or theirs of the norms before the mixer and the channel mixer."""
    pairs = names if isinstance(names, Mapping) else dict(zip(PRENORM, names, strict=True))
    for i, block in enumerate(blocks_of(config)):
        ours, theirs = f"stack.layers.{i}", f"{prefix}.{i}"
        links.named(ours, theirs, pairs)
        yield block, ours, theirs


def link_ends(
    links: WeightMap, config: LanguageModelConfig, *, prefix: str = "model", embedding: str = "embed_tokens",
    norm: str = "norm", head: str = "lm_head",
) -> None:
    """Embedding, final norm and head."""
    links.same("stem.embedding", f"{prefix}.{embedding}")
    links.same("final_norm", f"{prefix}.{norm}")
    if links.has("head.proj"):
        links.same("head.proj", head)
    else:
        links.same("head.bias", f"{head}.bias")
        links.copied(f"{head}.weight", f"{prefix}.{embedding}.weight")


def link_attention(links: WeightMap, ours: str, theirs: str, **names: str | None) -> None:
    """Attention of four projections; ``names``: theirs where they are not ours, None for what the family links itself."""
    same = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    out: dict[str, str | None] = {"out_proj": "o_proj", **dict(zip(same, same, strict=True)), **names}
    for one, other in out.items():
        if other is not None:
            links.same(f"{ours}.{one}", f"{theirs}.{other}")


def link_grouped(links: WeightMap, ours: Sequence[str], theirs: str, n: int) -> None:
    """Projections that are one of theirs, whose rows go through ``n`` heads: of each head the rows of every one of ours."""
    for rest in ("weight", "bias"):
        names = [f"{one}.{rest}" for one in ours]
        if links.has(names[0]):
            _link_grouped(links, names, f"{theirs}.{rest}", n)


def _link_grouped(links: WeightMap, names: list[str], theirs: str, n: int) -> None:
    sizes = [links.own[name][0] // n for name in names]

    def read(x: list[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in x[0].unflatten(0, (n, -1)).split(sizes, 1)]

    def write(x: list[Tensor]) -> list[Tensor]:
        return [torch.cat([one.unflatten(0, (n, -1)) for one in x], 1).flatten(0, 1)]

    links.link(names, [theirs], read, write)


GATED = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a gated channel mixer."""


def link_gated(
    links: WeightMap, ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> None:
    """A gated channel mixer of three projections."""
    links.named(ours, theirs, {"gate_proj": gate, "up_proj": up, "down_proj": down})


def link_fused_gated(links: WeightMap, ours: str, theirs: str, both: str = "gate_up_proj", down: str = "down_proj") -> None:
    """A gated channel mixer whose gate and values are one matrix there, one after the other."""
    links.fused([f"{ours}.gate_proj", f"{ours}.up_proj"], f"{theirs}.{both}")
    links.same(f"{ours}.down_proj", f"{theirs}.{down}")


def link_channel(
    links: WeightMap, ours: str, theirs: str, channel: Any, *, dense: str | None = None, gates: Sequence[str] = GATED,
    fused: bool = False, unit: Callable[[WeightMap, str, str], None] = link_gated, router: str = "gate",
    bias: str = "gate.e_score_correction_bias", shared: str = "shared_experts",
) -> None:
    """A gated channel mixer, or experts and what is beside them; ``channel``: its options. The others: how theirs are called;
    ``dense``: where a layer without experts has its matrices; ``gates``: an expert's matrices; ``fused``: those of all experts
    are two tensors; ``unit``: links a dense layer, and the shared experts."""
    if not links.has(f"{ours}.router"):
        return unit(links, ours, dense or theirs)
    links.named(ours, theirs, {"router": router, "selection.bias": bias, "shared_gate": f"{shared}_gate"})
    if fused:
        link_fused_experts(links, f"{ours}.experts", f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj")
    else:
        link_experts(links, f"{ours}.experts", f"{theirs}.experts", channel.n_experts, *gates)
    return unit(links, f"{ours}.shared", f"{theirs}.{shared}")


def link_streams(links: WeightMap, ours: str, theirs: str) -> None:
    """The mixing of hyper-connections; ``theirs``: how their names begin."""
    for one, other in (("proj", "fn"), ("bias", "base"), ("scale", "scale")):
        links.same(f"{ours}.logits.{one}", f"{theirs}{other}")


def link_experts(
    links: WeightMap, ours: str, theirs: str, n: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> None:
    """Experts with files of their own: ``theirs.EXPERT.gate_proj`` and so on."""
    for one, other in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        if links.has(f"{ours}.{one}"):
            links.stacked(f"{ours}.{one}", [f"{theirs}.{i}.{other}.weight" for i in range(n)])


def link_fused_experts(links: WeightMap, ours: str, gate_up: str, down: str) -> None:
    """Experts in two tensors: (e 2f d), gate before up, and (e d f)."""
    both = [f"{ours}.gate_proj", f"{ours}.up_proj"]
    links.link(both, [gate_up], lambda x: list(x[0].mT.chunk(2, -1)), lambda x: [torch.cat(x, -1).mT])
    links.turned(f"{ours}.down_proj", down, lambda x: x.mT, lambda x: x.mT)


def link_mamba(links: WeightMap, ours: str, theirs: str) -> None:
    """A layer of Mamba."""
    links.named(ours, theirs, ("in_proj", "x_proj", "out_proj", "A_log", "D", "dt_proj"))
    links.same(f"{ours}.dt_bias", f"{theirs}.dt_proj.bias")
    links.convolution(f"{ours}.conv", f"{theirs}.conv1d")


def link_mamba2(links: WeightMap, ours: str, theirs: str) -> None:
    """A layer of Mamba-2."""
    links.named(ours, theirs, ("in_proj", "out_proj", "A_log", "D", "dt_bias", "norm"))
    links.convolution(f"{ours}.conv", f"{theirs}.conv1d")


def link_scan_or_attention(links: WeightMap, ours: str, theirs: str, mixer: Any) -> None:
    """A layer of Mamba, of Mamba-2 or of attention, by the ``mixer``'s options; ``theirs``: the layer."""
    if mixer.type == "attention":
        return link_attention(links, ours, f"{theirs}.self_attn")
    return (link_mamba2 if mixer.type == "mamba2" else link_mamba)(links, ours, f"{theirs}.mamba")
