"""The settings of a published checkpoint (its ``config.json``), read so that nothing is passed over.

Every key has to be asked for. What a family does not ask for is refused at the end: it may change what the model computes. Only
what says nothing about that (:data:`SILENT`) may stand there unread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtf.core import CheckpointError

CONFIG = "config.json"

SILENT = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "attn_implementation", "auto_map", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "finetuning_task", "for_fim",
    "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "model_type", "num_logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_associative_scan", "use_cache", "use_falcon_mambapy",
    "use_mamba_kernels", "use_mambapy",
})
"""Ids of special tokens, training, caching, file formats: the scores of a token are the same whatever they say."""

FIRST_KINDS = {
    "mamba": "linear_attention", "attention": "full_attention", "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Entries of ``layer_types`` by the names that they had first, in all families."""

_MISSING: Any = object()


class Settings:
    """One table of settings, at ``where`` in the file. ``take`` and its kin raise :class:`CheckpointError`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = dict(values), where
        kinds = self.values.get("layer_types")
        if isinstance(kinds, list):
            self.values["layer_types"] = [FIRST_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        self._read: set[str] = set()
        self._inner: list[Settings] = []

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def take(self, name: str, default: Any = _MISSING, *, kind: type | tuple[type, ...] | None = None) -> Any:
        """The setting ``name``; ``default`` where it is not there or null. ``kind``: what it must be."""
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where}: {name} is missing")
            return default
        if kind is not None and not _is(value, kind):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, which is no {_word(kind)}")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """A whole number above 0."""
        value = self.take(name, default, kind=int)
        if value is default:
            return value  # type: ignore[no-any-return]
        if value < 1:
            raise CheckpointError(f"{self.where}: {name} is {value}, and must be at least 1")
        return int(value)

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A number."""
        value = self.take(name, default, kind=(int, float))
        return value if value is default else float(value)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value: bool = self.take(name, default, kind=bool)
        return value

    def only(self, name: str, *allowed: Any, default: Any = _MISSING) -> Any:
        """A setting that has to be one of ``allowed``: other values are other models, which the family does not have."""
        value = self.take(name, allowed[0] if default is _MISSING else default)
        if value not in allowed:
            raise CheckpointError(f"{self.where}: {name} is {value!r}; known here: {', '.join(map(repr, allowed))}")
        return value

    def inner(self, name: str) -> Settings:
        """A table among the settings, empty where it is not there; what is not read of it is refused as well."""
        values = self.take(name, {}, kind=dict)
        found = Settings(values, f"{self.where}: {name}")
        self._inner.append(found)
        return found

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Settings that the file leaves out; unlike its own, they need not be asked for."""
        left_out = defaults.keys() - self.values.keys()
        self.values |= {name: defaults[name] for name in left_out}
        self._read |= left_out

    def says_nothing(self, known: Mapping[str, tuple[Any, ...]]) -> None:
        """Settings from which nothing is computed, where they are as ``known``; empty: whatever they are."""
        self._read |= {name for name, values in known.items() if not values or self.values.get(name) in values}

    def passed_over(self, *names: str) -> None:
        """These say nothing of the model in this family."""
        self._read.update(names)

    def refuse_the_rest(self) -> None:
        """Raises :class:`CheckpointError` for keys that nothing asked for."""
        rest = sorted(name for name, value in self.values.items() if name not in self._read | SILENT and value is not None)
        if rest:
            raise CheckpointError(
                f"{self.where}: {_listed(rest)} {'is' if len(rest) == 1 else 'are'} not known of this family and may change "
                "the model"
            )
        for one in self._inner:
            one.refuse_the_rest()


def read_settings(file: Path) -> Settings:
    """Raises :class:`CheckpointError` where the file is not there or no table."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        what = f"a published checkpoint is a folder with {CONFIG} and safetensors"
        raise CheckpointError(f"{file}: no such file; {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: is no table of settings")
    return Settings(values, str(file))


def write_settings(file: Path, values: Mapping[str, Any]) -> None:
    """As transformers writes them."""
    file.write_text(json.dumps(_plain(values), indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {"__float__": "Infinity" if value > 0 else "-Infinity"} if isinstance(value, float) and math.isinf(value) else value


def _number(table: dict[str, Any]) -> Any:
    """JSON has no infinity; transformers writes ``{"__float__": "Infinity"}``."""
    return float(table["__float__"]) if table.keys() == {"__float__"} else table


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _word(kind: type | tuple[type, ...]) -> str:
    words = {int: "whole number", float: "number", bool: "true or false", dict: "table", list: "list", str: "text"}
    return words[kind[-1] if isinstance(kind, tuple) else kind]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

