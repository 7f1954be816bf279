"""``moe``: mixture of experts, by idea: routing, experts, losses, the selection bias, and the mixer that joins them."""

from __future__ import annotations

from hybridtf.channel_mixers.moe.mixer import PRESETS, MoE, MoEConfig

__all__ = ["PRESETS", "MoE", "MoEConfig"]
