"""Positions, by the site at which they are told: on queries and keys, on scores, on the input, nowhere.

``rope.py`` and ``scaling.py`` rotary positions and how they are stretched, ``xpos.py`` rotary with decay, ``bias.py`` ALiBi,
``sinusoidal.py`` and ``learned.py`` on the input, ``none.py``. README.md says how lengths are meant.
"""

from hybridtf.nn.positions.bias import Alibi, AlibiConfig
from hybridtf.nn.positions.learned import LearnedPosition, LearnedPositionConfig
from hybridtf.nn.positions.none import NoPositionConfig
from hybridtf.nn.positions.rope import Rope, RopeConfig, Rotation
from hybridtf.nn.positions.scaling import (
    SCALINGS,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from hybridtf.nn.positions.sinusoidal import SinusoidalPosition, SinusoidalPositionConfig
from hybridtf.nn.positions.told import shared_tables, token_positions, told, told_at
from hybridtf.nn.positions.xpos import XPos, XPosConfig

__all__ = [
    "SCALINGS",
    "Alibi",
    "AlibiConfig",
    "DynamicNTKScaling",
    "LearnedPosition",
    "LearnedPositionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NTKScaling",
    "NoPositionConfig",
    "ProportionalScaling",
    "Rope",
    "RopeConfig",
    "RopeScaling",
    "Rotation",
    "SinusoidalPosition",
    "SinusoidalPositionConfig",
    "XPos",
    "XPosConfig",
    "YarnScaling",
    "shared_tables",
    "token_positions",
    "told",
    "told_at",
]
