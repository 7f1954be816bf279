"""Other mixers in place of a trained model's, with every weight kept whose meaning survives."""

from __future__ import annotations

from hybridtf.surgery.layers import parse_layers
from hybridtf.surgery.replace import MixerError, Operated, replace_mixers
from hybridtf.surgery.transfer import Fate, Piece

__all__ = ["Fate", "MixerError", "Operated", "Piece", "parse_layers", "replace_mixers"]
