"""What many families share: ends of a model, attention, channel mixers and Mamba layers, as settings and as links."""

from __future__ import annotations

from typing import Any

from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2",
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


def first_of(blocks: list[Any], mixer: str) -> Any:
    """The mixer of the first block that has one of this type. Raises StopIteration, which an export takes for a no."""
    return next(block.mixer for block in blocks if block.mixer is not None and block.mixer.type == mixer)


def norm(settings: Settings, name: str = "rms_norm_eps", default: float = 1e-6) -> dict[str, Any]:
    """A norm by root mean squares."""
    return {"type": "rms_norm", "eps": settings.number(name, default)}


def gated(settings: Settings, d_ff: int, *, bias: bool = False, act: str = "hidden_act") -> dict[str, Any]:
    """A gated channel mixer."""
    kind = activation(settings, act)
    table: dict[str, Any] = {"type": "swiglu", "d_ff": d_ff} if kind == "silu" else {"type": "glu", "d_ff": d_ff, "activation": kind}
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


def link_ends(links: WeightMap, config: LanguageModelConfig, *, prefix: str = "model", embedding: str = "embed_tokens", norm: str = "norm") -> None:
    """Embedding, final norm and head."""
    links.same("stem.embedding", f"{prefix}.{embedding}")
    links.same("final_norm", f"{prefix}.{norm}")
    if links.has("head.proj"):
        links.same("head.proj", "lm_head")
    else:
        links.copied("lm_head.weight", f"{prefix}.{embedding}.weight")


def link_attention(links: WeightMap, ours: str, theirs: str, **names: str) -> None:
    """Attention of four projections; ``names``: theirs where they are not ours."""
    out = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"} | names
    for one, other in out.items():
        links.same(f"{ours}.{one}", f"{theirs}.{other}")


def link_gated(links: WeightMap, ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> None:
    """A gated channel mixer of three projections."""
    for one, other in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        links.same(f"{ours}.{one}", f"{theirs}.{other}")


def link_experts(links: WeightMap, ours: str, theirs: str, n: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> None:
    """Experts with files of their own: ``theirs.EXPERT.gate_proj`` and so on."""
    for one, other in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        if links.has(f"{ours}.{one}"):
            links.stacked(f"{ours}.{one}", [f"{theirs}.{i}.{other}.weight" for i in range(n)])


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
