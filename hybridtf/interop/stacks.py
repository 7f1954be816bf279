"""Layers as they come, one table each, as named blocks and a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtf.models.pattern import print_pattern

LETTERS = {
    "attention": "a", "gqa": "a", "mla": "a", "mamba": "m", "mamba2": "m", "griffin_recurrent": "r", "gated_delta_net": "d",
    "kda": "k", "gated_attention": "a", "lightning_attention": "l", "gated_short_conv": "c", "rwkv4": "r", "mlstm": "x",
}
"""How a block is called by its mixer; one with a window is ``s``, one without a mixer ``f``."""


def stack_of(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``pattern`` and ``blocks``: equal layers are one block, called by its mixer and, from the second of a kind, a number."""
    blocks: dict[str, dict[str, Any]] = {}
    names = []
    for layer in layers:
        name = next((name for name, block in blocks.items() if block == layer), None)
        if name is None:
            letter = _letter(layer)
            taken = sum(known.rstrip("0123456789") == letter for known in blocks)
            name = letter if not taken else f"{letter}{taken + 1}"
            blocks[name] = layer
        names.append(name)
    return {"pattern": print_pattern(names), "blocks": blocks}


def _letter(layer: dict[str, Any]) -> str:
    mixer = layer.get("mixer")
    if mixer is None:
        return "e" if layer.get("channel_mixer", {}).get("n_experts") else "f"
    return "s" if mixer.get("window") else LETTERS.get(mixer["type"], "b")
