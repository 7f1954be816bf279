"""Ops: pure tensor functions, one folder each, with a reference that defines the meaning and faster forms beside it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import Kernel, OpCase
from hybridtf.hookspecs import hookimpl
from hybridtf.ops import attention, grouped_linear, linear_scan, long_conv, rnn, selective_scan, short_conv, ssd, state_space


@hookimpl
def hybridtf_kernels() -> Sequence[Kernel]:
    return (
        *attention.KERNELS,
        *linear_scan.KERNELS,
        *rnn.KERNELS,
        *selective_scan.KERNELS,
        *grouped_linear.KERNELS,
        *short_conv.KERNELS,
        *long_conv.KERNELS,
        *ssd.KERNELS,
        *state_space.KERNELS,
    )


@hookimpl
def hybridtf_op_cases() -> Sequence[OpCase]:
    return (
        *selective_scan.CASES,
        *ssd.CASES,
        *state_space.CASES,
        *long_conv.CASES,
    )
