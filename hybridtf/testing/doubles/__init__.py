"""Small exact components, one for each part of the contract: examples to read, and doubles to test other parts with.

``double_ema``       Fixed state, an op with two kernels, ``keep``
``double_sum``       Growing state
``double_declared``  the same, and numbers that depend on the ``max_len`` of the state
``double_window``    Ring state
``double_pool``      sparse Growing state: one entry a block, and a partial block
``double_cross``     Context
``double_edges``     reads and writes edges, has a loss, no state
``double_mesh``      splits its channels over ``ctx.mesh``
``double_shift``     a channel mixer with a state
``double_block``     a residual block around any mixer

:func:`registries` holds them under these names. Axes: b batch, t time, s slots, c channels, d d_model.
"""

from hybridtf.core import Registries
from hybridtf.ops import short_conv
from hybridtf.testing.doubles.cached import (
    DeclaredConfig,
    DeclaredMixer,
    SumConfig,
    SumMixer,
    WindowConfig,
    WindowMixer,
)
from hybridtf.testing.doubles.crossing import CrossConfig, CrossMixer
from hybridtf.testing.doubles.layers import DoubleBlock, DoubleBlockConfig, ShiftConfig, ShiftMixer
from hybridtf.testing.doubles.pooled import PoolConfig, PoolMixer
from hybridtf.testing.doubles.recurrent import KERNELS, EmaConfig, EmaMixer, ema_matrix, ema_reference
from hybridtf.testing.doubles.stateless import EdgesConfig, EdgesMixer, MeshConfig, MeshMixer

CONFIGS = (
    EmaConfig, SumConfig, DeclaredConfig, WindowConfig, PoolConfig, CrossConfig, EdgesConfig, MeshConfig, ShiftConfig,
    DoubleBlockConfig,
)


def registries() -> Registries:
    """The doubles and their kernels alone, for ``hybridtf.core.using``."""
    out = Registries()
    for config in CONFIGS:
        out[config.kind].add(config, "doubles")
    for kernel in (*KERNELS, *short_conv.KERNELS):
        out.kernels.add(kernel)
    return out


__all__ = [
    "CONFIGS", "KERNELS", "CrossConfig", "CrossMixer", "DeclaredConfig", "DeclaredMixer", "DoubleBlock",
    "DoubleBlockConfig", "EdgesConfig", "EdgesMixer", "EmaConfig", "EmaMixer", "MeshConfig", "MeshMixer", "PoolConfig",
    "PoolMixer", "ShiftConfig", "ShiftMixer", "SumConfig", "SumMixer", "WindowConfig", "WindowMixer", "ema_matrix",
    "ema_reference", "registries",
]
