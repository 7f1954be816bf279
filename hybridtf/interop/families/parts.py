"""What many families share: ends of a model, attention, channel mixers and Mamba layers, as settings and as links."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "gelu_fast": "gelu_tanh",
}
"""Theirs by name, as ours."""


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


def undone(factor: float) -> float:
    """The number whose reciprocal is exactly ``factor``, where one that is near is: a divisor told as a factor."""
    near = 1 / factor
    return next((x for x in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / x == factor), near)


def first_of(blocks: list[Any], mixer: str) -> Any:
    """The mixer of the first block that has one of this type. Raises StopIteration, which an export takes for a no."""
    return next(block.mixer for block in blocks if block.mixer is not None and block.mixer.type == mixer)


def norm(settings: Settings, name: str = "rms_norm_eps", default: float = 1e-6) -> dict[str, Any]:
    """A norm by root mean squares."""
    return {"type": "rms_norm", "eps": settings.number(name, default)}


def layer_kinds(settings: Settings, is_full: Callable[[int], bool], local: str = "sliding_attention") -> list[bool]:
    """Whether each layer sees only what is near: by ``layer_types``, else all that are not ``is_full``."""
    n, said = settings.count("num_hidden_layers"), settings.take("layer_types", None, kind=list)
    if said is None:
        return [not is_full(i) for i in range(n)]
    unknown = sorted({str(kind) for kind in said} - {local, "full_attention"})
    if len(said) != n or unknown:
        also = f", and unknown {unknown}" if unknown else ""
        raise CheckpointError(f"{settings.where}: layer_types has {len(said)} entries for {n} layers{also}")
    return [kind == local for kind in said]


def optional(settings: Settings, name: str, default: float | None) -> float | None:
    """A number, or None where the file says null; ``default`` where it says nothing."""
    return settings.number(name, None) if name in settings.values else default


def gated(
    settings: Settings, d_ff: int, *, bias: bool = False, act: str = "hidden_act", default: str = "silu"
) -> dict[str, Any]:
    """A gated channel mixer; the setting ``act`` names its activation, ``default`` where it does not."""
    kind = activation(settings, act, default)
    table: dict[str, Any] = {"type": "swiglu", "d_ff": d_ff}
    if kind != "silu":
        table = {"type": "glu", "d_ff": d_ff, "activation": kind}
    return {**table, "bias": True} if bias else table


def ends(settings: Settings, *, tied: bool) -> dict[str, Any]:
    """Sizes of a language model and whether its head is the embedding."""
    return {
        "vocab_size": settings.count("vocab_size"), "d_model": settings.count("hidden_size"),
        "max_seq_len": settings.count("max_position_embeddings", 2048),
        "head": {"type": "lm_head", "tied": settings.flag("tie_word_embeddings", tied)},
    }


def ends_settings(config: LanguageModelConfig) -> dict[str, Any]:
    """The same as settings."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": bool(getattr(config.head, "tied", True)), "num_hidden_layers": len(config.layers()),
    }


def window_settings(config: LanguageModelConfig, local: str = "sliding_attention") -> dict[str, Any]:
    """``layer_types`` and ``sliding_window``, null where no layer has one."""
    blocks: list[Any] = [config.blocks[name] for name in config.layers()]
    sizes = [block.mixer.window for block in blocks]
    kinds = ["full_attention" if one is None else local for one in sizes]
    return {"sliding_window": next((one for one in sizes if one is not None), None), "layer_types": kinds}


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


def link_grouped_qkv(links: WeightMap, ours: str, theirs: str, n_kv_heads: int, head_dim: int) -> None:
    """Queries, keys and values as one matrix: of each key head its queries, then its key, then its value."""
    def read(x: list[Tensor]) -> list[Tensor]:
        groups = x[0].unflatten(0, (n_kv_heads, -1, head_dim))
        return [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]

    def write(x: list[Tensor]) -> list[Tensor]:
        return [torch.cat([one.unflatten(0, (n_kv_heads, -1, head_dim)) for one in x], 1).flatten(0, 2)]

    for rest in ("weight", "bias"):
        if links.has(f"{ours}.q_proj.{rest}"):
            links.link([f"{ours}.{role}_proj.{rest}" for role in "qkv"], [f"{theirs}.{rest}"], read, write)


GATED = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a gated channel mixer."""


def link_gated(
    links: WeightMap, ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> None:
    """A gated channel mixer of three projections."""
    for one, other in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        links.same(f"{ours}.{one}", f"{theirs}.{other}")


def link_experts(
    links: WeightMap, ours: str, theirs: str, n: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> None:
    """Experts with files of their own: ``theirs.EXPERT.gate_proj`` and so on."""
    for one, other in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        if links.has(f"{ours}.{one}"):
            links.stacked(f"{ours}.{one}", [f"{theirs}.{i}.{other}.weight" for i in range(n)])


def link_packed_experts(links: WeightMap, ours: str, theirs: str) -> None:
    """Experts in two tensors: ``gate_up_proj`` (e 2f d), gates first, and ``down_proj`` (e d f)."""
    links.link(
        [f"{ours}.gate_proj", f"{ours}.up_proj"], [f"{theirs}.gate_up_proj"], lambda x: [part.mT for part in x[0].chunk(2, 1)],
        lambda x: [torch.cat([part.mT for part in x], 1)],
    )
    links.turned(f"{ours}.down_proj", f"{theirs}.down_proj", lambda x: x.mT, lambda x: x.mT)


def link_mamba(links: WeightMap, ours: str, theirs: str) -> None:
    """A layer of Mamba."""
    for name in ("in_proj", "x_proj", "out_proj", "A_log", "D"):
        links.same(f"{ours}.{name}", f"{theirs}.{name}")
    links.same(f"{ours}.dt_proj", f"{theirs}.dt_proj")
    links.same(f"{ours}.dt_bias", f"{theirs}.dt_proj.bias")
    links.convolution(f"{ours}.conv", f"{theirs}.conv1d")


def link_mamba2(links: WeightMap, ours: str, theirs: str) -> None:
    """A layer of Mamba-2."""
    for name in ("in_proj", "out_proj", "A_log", "D", "dt_bias", "norm"):
        links.same(f"{ours}.{name}", f"{theirs}.{name}")
    links.convolution(f"{ours}.conv", f"{theirs}.conv1d")
