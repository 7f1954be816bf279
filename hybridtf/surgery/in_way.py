"""What stands, newly drawn, between weights that were carried over and what they did before.

A mixer that starts with it computes something else at first, whatever was kept: a gate multiplies what goes out by numbers that
are as good as random, an activation bends queries, keys and values, a mix with the token before changes what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hybridtf.nn import ShortConv, TokenShift
from hybridtf.surgery.transfer import Piece

_GATES = ("[z]", "[gate]")


def in_the_way(module: nn.Module, pieces: Iterable[Piece]) -> tuple[str, ...]:
    """In words, one for each part of the new mixer; empty where nothing was carried over."""
    pieces = tuple(pieces)
    fresh = [piece.tensor for piece in pieces if piece.fate == "fresh"]
    if not any(piece.fate in ("kept", "reshaped") for piece in pieces):
        return ()
    found = []
    for name, part in module.named_modules():
        if isinstance(part, TokenShift):
            found.append(f"{name} (projections read a mix with the token before)")
        if isinstance(part, ShortConv) and any(tensor.startswith(f"{name}.") for tensor in fresh):
            itself = all(piece.how for piece in pieces if piece.tensor.startswith(f"{name}.") and piece.fate == "fresh")
            if part.activation is not None or not itself:
                first = "each token itself" if itself else f"{part.d_conv} random taps"
                found.append(f"{name} ({first}{'' if part.activation is None else f', then {part.activation}'})")
    gates = dict.fromkeys(tensor for tensor in fresh if tensor.startswith("gate_proj.") or tensor.endswith(_GATES))
    return (*found, *(f"{name} (multiplies what goes out)" for name in gates))
