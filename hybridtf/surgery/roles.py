"""What the projections of a mixer are for, by its type: the one place that says it.

Queries, keys, values and the way out mean the same in attention and in recurrences whose memory is written with keys and
values and read with queries: y_t = sum_s w(q_t, k_s) v_s, through ``out``. A part is a linear map by its name in the mixer, or
one map of a matrix that holds several, as ``in_proj[c]``, by the name that the mixer's ``splits`` has for it.

Axes: h query heads, g kv heads, k width of a query or key head, v width of a value head, d d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from torch import nn

from hybridtf.core import SequenceMixerConfig

Role: TypeAlias = Literal["q", "k", "v", "out", "q_norm", "k_norm"]

_PLAIN: Mapping[Role, str] = MappingProxyType({
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj", "q_norm": "q_norm", "k_norm": "k_norm",
})
# Mamba-2 as linear attention: C reads, B writes, x is written (https://arxiv.org/abs/2405.21060, section 5).
_MAMBA2: Mapping[Role, str] = {"q": "in_proj[c]", "k": "in_proj[b]", "v": "in_proj[x]", "out": "out_proj"}

_RWKV: Mapping[Role, str] = MappingProxyType({**_PLAIN, "q": "r_proj"})

_TYPES_OF_PLAIN = (
    "attention", "bigbird", "block_indexed_attention", "chunked_attention", "comba", "cosformer", "delta_net", "dilated",
    "forgetting_attention", "gated_delta_net", "gdn2", "gla", "gsa", "indexed_attention", "kda", "lightning_attention",
    "linear_attention", "linear_transformer", "longformer", "mesa", "mlstm", "moba", "nsa", "path_attention", "performer",
    "relative_attention", "retnet", "simple_gla", "stick_breaking", "strided_sparse", "talking_heads",
    "tiled_attention", "titans", "ttt_linear",
)

ROLES: Mapping[str, Mapping[Role, str]] = {
    **dict.fromkeys(_TYPES_OF_PLAIN, _PLAIN),
    "gated_attention": {**_PLAIN, "q": "q_proj[q]"},
    "log_linear": _MAMBA2,
    "mamba2": _MAMBA2,
    **dict.fromkeys(("rwkv5", "rwkv6", "rwkv7"), _RWKV),
}
"""By type of mixer. Other mixers share nothing with these: what replaces them, and they themselves, start anew."""


@dataclass(frozen=True)
class Heads:
    """How a mixer's channels fall into heads: heads of queries, keys, values and of what goes out, and widths."""

    q: int
    k: int
    v: int
    out: int
    key_width: int
    value_width: int
    d_model: int


def heads_of(config: SequenceMixerConfig, mixer: nn.Module) -> Heads | None:
    """None for a mixer of no known roles."""
    parts = ROLES.get(config.type_name())
    if parts is None:
        return None
    sizes = {role: n for role in ("q", "k", "v") if (n := _rows(mixer, parts[role])) is not None}
    n = getattr(config, "n_heads", None)
    if config.type_name() in ("mamba2", "log_linear"):
        groups: int = config.n_groups  # type: ignore[attr-defined]
        q = k = groups
        v = out = int(mixer.n_heads)  # type: ignore[arg-type]
    else:
        q = n or sizes["q"] // config.head_dim  # type: ignore[attr-defined]
        k = getattr(config, "kv_heads", q)
        v, out = (getattr(config, "value_heads", other) for other in (k, q))
    d_model = mixer.get_parameter("out_proj.weight").shape[0]
    return Heads(q, k, v, out, sizes["q"] // q, sizes.get("v", sizes["q"] // q * v) // v, d_model)


def _rows(mixer: nn.Module, part: str) -> int | None:
    """Of a projection, or of one map of a matrix that holds several; None where the mixer has it not."""
    module, _, piece = part.rstrip("]").partition("[")
    if piece:
        return int(mixer.splits[module][piece])  # type: ignore[index]
    found = getattr(mixer, module, None)
    return None if found is None else int(found.weight.shape[0])


# -- options -------------------------------------------------------------------------------------------------------------

READ_WITH = (
    "position", "qk_norm", "qk_norm_over", "qk_norm_after", "qkv_bias", "out_bias", "scale", "qkv_clip", "value_scale",
    "v_norm", "query_factor", "query_growth",
)
"""Options without which kept queries, keys and values would mean something else."""

HEAD_OPTIONS = (
    "n_heads", "n_kv_heads", "n_v_heads", "n_groups", "head_dim", "v_dim", "d_state", "expand", "expand_k", "expand_v",
)
"""Options that say how channels fall into heads."""

HOW_COMPUTED = ("type", "kernel", "conv_kernel", "chunk_size")
"""Options that no number of the output depends on."""

UNSET = ("window",)
"""Options of the same type that a table without them means to be without."""


def taken_options(
    cls: type[SequenceMixerConfig], fixed: Mapping[str, Any], old: SequenceMixerConfig, heads: Heads | None
) -> dict[str, Any]:
    """What a new mixer of class ``cls`` takes from the one that it replaces, where nothing else is said.

    All options of a mixer of its own type but :data:`UNSET`; of another type numbers and widths of heads, as far as both
    have roles, and :data:`READ_WITH`, where both have such an option. ``fixed``: what a preset fixes.
    """
    if type(old) is cls:
        found = {name: getattr(old, name) for name in cls.model_fields if name != "type" and name not in UNSET}
    elif heads is None or cls.type_name() not in ROLES:
        return {}
    else:
        like = {name for name in READ_WITH if _same_option(cls, type(old), name)}
        found = {**_of_heads(cls, heads), **{name: getattr(old, name) for name in sorted(like)}}
    options = {name: option.get_default(call_default_factory=True) for name, option in cls.model_fields.items()}
    return {
        name: value for name, value in found.items()
        if name in options and name not in fixed and value is not None and value != options[name]
    }


def _of_heads(cls: type[SequenceMixerConfig], heads: Heads) -> dict[str, Any]:
    widths = {"head_dim": heads.key_width, "v_dim": heads.value_width}
    # Several heads may share a query (groups, more heads of values): each then gets its own, which is the same one.
    shared = heads.q < heads.out
    if cls.type_name() in ("mamba2", "log_linear"):
        # A query of its own for each head, as keys and values are copied for: https://arxiv.org/abs/2408.15237.
        return {"n_heads": heads.out, "n_groups": heads.q, "d_state": heads.key_width, "head_dim": heads.value_width}
    if "n_v_heads" in cls.model_fields:
        return {"n_heads": heads.q, "n_v_heads": heads.out if shared else None, **widths}
    return {
        "n_heads": heads.out, "n_kv_heads": None if shared or heads.k == heads.q else heads.k, **widths,
        "expand_k": heads.out * heads.key_width / heads.d_model, "expand_v": heads.out * heads.value_width / heads.d_model,
    }


def left_behind(old: SequenceMixerConfig, new: SequenceMixerConfig, given: Collection[str]) -> dict[str, Any]:
    """Options of the ``old`` mixer that are not at their default, and that the ``new`` one has not, or not so; and positions.

    Those in ``given``, of which somebody decided, are left out, and those that say how heads are cut.
    """
    found: dict[str, Any] = {}
    for name, option in type(old).model_fields.items():
        value = getattr(old, name)
        # Rotary positions are a default, and queries and keys that were made for them are not those of a mixer without.
        plain = value == option.get_default(call_default_factory=True) and name != "position"
        nothing = name == "position" and getattr(value, "type", "none") == "none"
        known = name in (*HEAD_OPTIONS, *HOW_COMPUTED, *given)
        if not (plain or nothing or known) and getattr(new, name, _NOT_THERE) != value:
            found[name] = value
    return found


_NOT_THERE = object()


def _same_option(one: type[SequenceMixerConfig], other: type[SequenceMixerConfig], name: str) -> bool:
    fields = [cls.model_fields.get(name) for cls in (one, other)]
    return all(fields) and _kind(fields[0].annotation) == _kind(fields[1].annotation)  # type: ignore[union-attr]


def _kind(annotation: Any) -> Any:
    """Of what an option may be; one that may also be left out is of the same kind."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    some = [part for part in get_args(annotation) if part is not type(None)]
    return _kind(some[0]) if get_origin(annotation) in (Union, UnionType) and len(some) == 1 else annotation
