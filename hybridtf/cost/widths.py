"""The same recipe at another width, or with a state of another size: which option follows which, by name.

Options are named after the field's standard terms (see ``recipes/README.md``), so a rule holds for every component that has the
option. An option that counts something and that no rule names is refused, not left as it is.

With f the ratio of the new d_model to the old:

- widths (``d_ff``, ``d_inner``, ``kv_lora_rank``, ...) are multiplied by f and rounded to their multiple;
- heads keep their width, and their number is multiplied by f: of keys and values first, of queries in the old ratio to them.
  Where not one head is left at its width, one narrower head is. Where the width is d_model / n_heads, the number is the one
  that divides d_model and leaves it nearest to the old;
- what counts tokens, states, experts, taps or layers stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hybridtf.core import (
    BlockConfig,
    ChannelMixerConfig,
    ComponentConfig,
    ConfigError,
    ModelConfig,
    SequenceMixerConfig,
    active,
)

FINE = frozenset({"d_ff", "d_ff_shared", "d_hidden"})
"""Widths that nothing else has to divide: what is left to match is matched by them."""

WIDTHS = FINE | {
    "a_rank", "d_inner", "d_latent", "dt_rank", "kv_lora_rank", "memory_width", "o_lora_rank", "q_lora_rank", "v_rank",
}

HEADS = frozenset({
    "head_dim", "n_groups", "n_heads", "n_kv_heads", "n_v_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_dim",
})

CONSTANTS = frozenset({
    "active", "attention_chunk_size", "block_size", "chunk_size", "compress_rate", "compress_size", "compress_stride",
    "d_conv", "d_conv_head", "d_edge", "d_embed", "d_filter", "d_rel", "d_router", "d_state", "decay_rank", "dilation",
    "gate_rank", "group_size",
    "index_head_dim", "index_n_heads", "index_pool", "index_top_k", "log_floor", "max_distance", "memory_layers", "mini_batch",
    "mix_rank", "n_always", "n_blocks", "n_cg_steps", "n_experts", "n_features", "n_global", "n_hashes", "n_householder",
    "n_identity", "n_inner", "n_levels", "n_local", "n_null", "n_out_groups", "n_random_blocks", "n_slots", "n_streams",
    "n_summary", "n_tokens", "n_window_blocks", "ngram_size", "order", "place", "rank", "rel_extent", "scales", "seed",
    "sinkhorn_iters", "start_token", "stride", "table_multiple", "table_parts", "table_size", "top_k", "top_k_groups",
    "vocab_size", "w_rank", "window",
})

KNOWN = WIDTHS | HEADS | CONSTANTS

STATE_SIZES = frozenset({"d_hidden", "d_inner", "d_state", "kv_lora_rank", "n_features", "n_slots", "window"})
"""Options that a state's bytes grow with, beside heads of keys and values, and the key width of a matrix state."""

Table: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[ComponentConfig, Table], Mapping[str, Any]]


def at_width(config: ModelConfig, d_model: int, fine: float = 1.0, multiple: int = 8) -> ModelConfig:
    """The config at another ``d_model``; ``fine`` multiplies the widths of :data:`FINE` once more, which are then multiples of
    ``multiple``. Raises :class:`ConfigError` where that is no legal model, or an option has no rule."""
    old = _blocks_of(config)
    factor = d_model / old

    def rule(part: ComponentConfig, table: Table) -> Table:
        _check(part, table)
        changes = {name: _near(value * factor, _multiple(value)) for name, value in table.items() if _is(name, WIDTHS, value)}
        for name in FINE & changes.keys():
            changes[name] = _near(table[name] * factor * fine, min(multiple, _multiple(table[name])))
        return changes | _heads(table, factor, changes.get("d_inner", d_model), table.get("d_inner", old))

    return _rebuilt(config, rule, d_model=d_model)


def with_state(config: ModelConfig, factor: float, fine: float = 1.0, multiple: int = 8) -> ModelConfig:
    """The config at its own width, with a state about ``factor`` times as large: what :data:`STATE_SIZES` names and the key
    width of a matrix state by ``factor * fine``; heads of keys and values by ``factor``, to a number that divides the query
    heads. Raises :class:`ConfigError` where that is no legal model."""
    _blocks_of(config)

    def rule(part: ComponentConfig, table: Table) -> Table:
        _check(part, table)
        if not isinstance(part, SequenceMixerConfig):
            return {}
        names = {name for name, value in table.items() if _is(name, STATE_SIZES, value)}
        if "d_state" in names:
            names -= {"d_inner"}  # the state is their product
        if not names and "n_kv_heads" in type(part).model_fields and "n_heads" in table:
            heads: int = table["n_heads"]
            held: int = table.get("n_kv_heads", heads)
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            found = min(divisors, key=lambda n: abs(math.log(n / (held * factor))))
            return {} if found == held else {"n_kv_heads": found}
        if not names and "n_heads" in table and "head_dim" in table and "n_kv_heads" not in type(part).model_fields:
            names = {"head_dim"}
        return {name: _near(table[name] * factor * fine, min(multiple, _multiple(table[name]))) for name in names}

    return _rebuilt(config, rule)


# -- how ---------------------------------------------------------------------------------------------------------------


def _blocks_of(config: ModelConfig) -> int:
    """The model's width. Raises :class:`ConfigError` for a model whose stack is not of one width and blocks of its own."""
    d_model = getattr(config, "d_model", None)
    if not isinstance(d_model, int) or not isinstance(getattr(config, "blocks", None), dict):
        raise ConfigError(f"a {config.type_name()!r} model has no d_model and blocks of its own: its width cannot be scaled")
    return d_model


def _rebuilt(config: ModelConfig, rule: Rule, **more: Any) -> ModelConfig:
    table = {**config.to_dict(), **more}
    table["blocks"] = {name: _part(block, rule) for name, block in config.blocks.items()}  # type: ignore[attr-defined]
    made: ModelConfig = active()["models"].make(table)  # type: ignore[assignment]
    return made


def _part(config: ComponentConfig, rule: Rule) -> Table:
    """The table of a block, mixer or channel mixer, with those inside it."""
    table = config.to_dict()
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BlockConfig | SequenceMixerConfig | ChannelMixerConfig):
            table[name] = _part(value, rule)
        elif isinstance(value, tuple) and any(isinstance(item, ComponentConfig) for item in value):
            table[name] = [_part(item, rule) for item in value]
    return {**table, **rule(config, table)}


def _check(part: ComponentConfig, table: Table) -> None:
    for name, value in table.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and name not in KNOWN:
            raise ConfigError(
                f"{part.type_name()!r} has {name} = {value}, and nothing says whether it follows the width: "
                "give the sizes by hand"
            )


def _is(name: str, names: frozenset[str], value: Any) -> bool:
    return name in names and isinstance(value, int) and not isinstance(value, bool) and value > 0


def _multiple(value: int) -> int:
    """The power of two, 8 at most, that divides ``value``, and so is kept."""
    return math.gcd(value, 8)


def _near(value: float, multiple: int) -> int:
    """The multiple nearest to ``value``; of a smaller one where that would change it by more than a few hundredths."""
    while multiple > 1 and value < 16 * multiple:
        multiple //= 2
    return max(round(value / multiple), 1) * multiple


def _heads(table: Table, factor: float, width: int, old_width: int) -> Table:
    """New numbers of heads, and widths where they cannot stay; ``width``: what heads of no width of their own share."""
    if "n_heads" not in table:
        return {}
    heads: int = table["n_heads"]
    held: int = table.get("n_kv_heads", heads)
    values = {"n_v_heads": table["n_v_heads"] // heads} if "n_v_heads" in table else {}
    dims = [name for name in ("head_dim", "v_dim", "qk_nope_head_dim", "qk_rope_head_dim") if name in table]
    changes: Table = {}
    if "head_dim" in table or "qk_nope_head_dim" in table:
        groups = max(round(held * factor), 1)
        new = groups * (heads // held) if held * factor >= 0.75 else max(round(heads * factor), 1)
        if heads * factor < 0.75:
            changes |= {name: _near(table[name] * factor * heads, _multiple(table[name])) for name in dims if table[name]}
    else:
        groups, new = _dividing(heads, held, width, old_width / heads)
    changes["n_heads"] = new
    if "n_kv_heads" in table:
        changes["n_kv_heads"] = groups
    changes |= {name: new * times for name, times in values.items()}
    if "n_groups" in table:
        changes["n_groups"] = max(n for n in range(1, table["n_groups"] + 1) if new % n == 0)
    return changes


def _dividing(heads: int, held: int, width: int, head_width: float) -> tuple[int, int]:
    """Numbers of held and of query heads that divide ``width`` into even parts as near to ``head_width`` as can be; the old
    ones where none does."""
    times = heads // held
    fit = [n for n in range(1, width // 2 + 1) if width % (2 * n) == 0 and (n % times == 0 or held == 1)]
    if not fit:
        return held, heads
    new = min(fit, key=lambda n: (abs(math.log(width / n / head_width)), n))
    return (1 if held == 1 else new // times), new
