"""Rotary settings of config.json, in the forms of transformers 5 (``rope_parameters``) and before (``rope_theta``,
``rope_scaling``), as the position of our attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtf.core import CheckpointError
from hybridtf.interop.settings import Settings

_TYPES = ("default", "linear", "dynamic", "proportional", "llama3", "yarn", "longrope")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def rope(
    settings: Settings, *, theta: float = 10000.0, fraction: float | None = None, kind: str | None = None,
    sections: bool = False,
) -> dict[str, Any]:
    """The table of a rotary position. ``theta`` and ``fraction``: where the settings do not say; without a ``fraction`` the
    family turns whole heads, and a file that says otherwise is refused; ``kind``: a kind of layer with settings of its own;
    ``sections``: pictures have several positions a token there, of which text has one in all channels."""
    length = settings.count("max_position_embeddings", 2048)
    if "rope_parameters" in settings and "rope_scaling" in settings:
        raise CheckpointError(f"{settings.where}: rope_parameters and rope_scaling both say how positions are; take one out")
    found = settings.inner("rope_parameters" if "rope_parameters" in settings else "rope_scaling")
    settings.passed_over("rope_parameters", "rope_scaling")
    if kind is not None and kind in found:
        found.passed_over(*found.values)  # other kinds of layer ask for their own
        found = found.inner(kind)
    if sections:
        found.passed_over("mrope_section", "mrope_interleaved")
    table: dict[str, Any] = {"type": "rope"}
    base = found.number("rope_theta", settings.number("rope_theta", theta))
    usual = 1.0 if fraction is None else fraction
    part = found.number("partial_rotary_factor", settings.number("partial_rotary_factor", usual))
    if base != 10000.0:
        table["theta"] = base
    scaling = _scaling(found, length)
    if scaling is not None and scaling["type"] == "proportional":
        scaling["turning"] = part
    elif part != 1.0 and fraction is None:
        raise CheckpointError(f"{settings.where}: partial_rotary_factor is {part}, and this family turns whole heads")
    elif part != 1.0:
        table["fraction"] = part
    return table if scaling is None else {**table, "scaling": scaling}


def _scaling(found: Settings, length: int) -> dict[str, Any] | None:
    type_name = found.take("rope_type", found.take("type", "default", kind=str), kind=str)
    if type_name == "default":
        found.only("factor", 1.0)
        return None
    if type_name == "dynamic":
        # Like longrope's choice, the base follows the length of a call, and held keys keep theirs: what transformers computes.
        found.passed_over("original_max_position_embeddings")  # it takes the model's own length
        return {"type": "dynamic_ntk", "factor": found.number("factor"), "original_max_len": length, "mode": "running"}
    original = found.count("original_max_position_embeddings", length)
    if type_name == "linear":
        return {"type": "linear", "factor": found.number("factor")}
    if type_name == "proportional":
        return {"type": "proportional", "factor": found.number("factor", 1.0)}
    if type_name == "llama3":
        return {
            "type": "llama3", "factor": found.number("factor"), "low_freq_factor": found.number("low_freq_factor"),
            "high_freq_factor": found.number("high_freq_factor"), "original_max_len": original,
        }
    if type_name == "yarn":
        more = {name: found.take(name) for name in _YARN if name in found}
        return {"type": "yarn", "factor": found.number("factor"), "original_max_len": original, **more}
    if type_name == "longrope":
        more = {name: found.take(name) for name in ("attention_factor", "factor") if name in found}
        return {
            "type": "longrope", "short_factor": found.take("short_factor", kind=list),
            "long_factor": found.take("long_factor", kind=list), "original_max_len": original, "mode": "running", **more,
        }
    raise CheckpointError(f"{found.where}: rope_type {type_name!r} is not known; known: {', '.join(_TYPES)}")


def rope_settings(position: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``rope_parameters`` of a position of ours."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": position["theta"]}
    if position["fraction"] != 1.0:
        found["partial_rotary_factor"] = position["fraction"]
    scaling = dict(position.get("scaling") or {})
    if scaling:
        name = scaling.pop("type")
        scaling.pop("mode", None)
        original = scaling.pop("original_max_len", None)
        if name == "proportional":
            found["partial_rotary_factor"] = scaling.pop("turning")
            scaling = {key: value for key, value in scaling.items() if value != 1.0}
        found |= {key: value for key, value in scaling.items() if value is not None}
        found["rope_type"] = {"dynamic_ntk": "dynamic"}.get(name, name)
        if original is not None:
            found["original_max_position_embeddings"] = original
    return found
