"""Bytes of a state by kind, at any length, from a state that was made of shapes without memory."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import ConvWindow, Growing, Ring, StateLeaf, leaves, state_bytes
from hybridtf.cost.live_bytes import WithoutMemory
from hybridtf.cost.phases import aged_state

STATE_KINDS = ("kv", "ring", "recurrent", "conv", "other")
"""Kinds of bytes: what grows with every token, windows, recurrent states, inputs of short convolutions, and plain tensors of
a foreign state."""


def state_size(model: nn.Module, length: int, batch_size: int = 1) -> dict[str, int]:
    """Bytes of the state of ``batch_size`` rows that hold ``length`` tokens each, lengths not counted.

    ``allocated``: with buffers of ``length`` tokens; ``used``: what holds tokens (pooled blocks: all that there
    is room for, up to one a row more than are whole). ``per_token``: what one more token
    adds for good; ``constant``: what does not grow. Then the allocated bytes of each of :data:`STATE_KINDS`.
    """
    with WithoutMemory().enter():
        state = model.init_state(batch_size, max_len=length)  # type: ignore[operator]
        longer = kinds_of(model.init_state(batch_size, max_len=length + 1))  # type: ignore[operator]
        kinds = kinds_of(state)
        used = state_bytes(aged_state(state, length), used=True) + kinds["other"]
    allocated = sum(kinds.values())
    per_token = sum(longer.values()) - allocated
    constant = allocated - per_token * length
    return {"allocated": allocated, "used": used, "per_token": per_token, "constant": constant, **kinds}


def kinds_of(state: Any) -> dict[str, int]:
    """Allocated bytes of a state by kind."""
    kinds = dict.fromkeys(STATE_KINDS, 0)
    for leaf in leaves(state):
        kinds[_kind(leaf)] += leaf.nbytes()
    kinds["other"] += _plain_bytes(state)
    return kinds


def _kind(leaf: StateLeaf) -> str:
    if isinstance(leaf, Growing):
        return "kv"
    if isinstance(leaf, Ring):
        return "ring"
    return "conv" if isinstance(leaf, ConvWindow) else "recurrent"


def _plain_bytes(state: Any) -> int:
    found = pytree.tree_leaves(state, is_leaf=lambda x: isinstance(x, StateLeaf))
    return sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor))
