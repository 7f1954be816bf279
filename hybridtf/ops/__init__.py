"""Ops: pure tensor functions, one folder each, with a reference that defines the meaning and faster forms beside it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import Kernel, OpCase
from hybridtf.hookspecs import hookimpl
from hybridtf.ops import (
    attention,
    block_sparse_attention,
    dplr,
    flop_formulas,  # noqa: F401 - registers them
    gated_delta_rule,
    gather_attention,
    gla,
    grouped_linear,
    linear_scan,
    log_linear,
    long_conv,
    mesa,
    path_attention,
    rnn,
    selective_scan,
    short_conv,
    slstm,
    ssd,
    state_space,
    stick_breaking,
    talking_attention,
    titans,
    ttt,
    wkv,
)


@hookimpl
def hybridtf_kernels() -> Sequence[Kernel]:
    return (
        *attention.KERNELS,
        *gla.KERNELS,
        *linear_scan.KERNELS,
        *rnn.KERNELS,
        *selective_scan.KERNELS,
        *grouped_linear.KERNELS,
        *short_conv.KERNELS,
        *ssd.KERNELS,
        *dplr.KERNELS,
        *wkv.KERNELS,
        *log_linear.KERNELS,
        *talking_attention.KERNELS,
        *block_sparse_attention.KERNELS,
        *slstm.KERNELS,
        *gated_delta_rule.KERNELS,
        *long_conv.KERNELS,
        *state_space.KERNELS,
        *titans.KERNELS,
        *ttt.KERNELS,
        *mesa.KERNELS,
        *gather_attention.KERNELS,
        *stick_breaking.KERNELS,
        *path_attention.KERNELS,
    )


@hookimpl
def hybridtf_op_cases() -> Sequence[OpCase]:
    return (
        *gla.CASES,
        *selective_scan.CASES,
        *ssd.CASES,
        *dplr.CASES,
        *wkv.CASES,
        *log_linear.CASES,
        *slstm.CASES,
        *gated_delta_rule.CASES,
        *state_space.CASES,
        *long_conv.CASES,
        *attention.CASES,
        *linear_scan.CASES,
        *rnn.CASES,
        *short_conv.CASES,
        *talking_attention.CASES,
        *titans.CASES,
        *ttt.CASES,
        *mesa.CASES,
        *gather_attention.CASES,
        *block_sparse_attention.CASES,
        *stick_breaking.CASES,
        *path_attention.CASES,
        *grouped_linear.CASES,
    )
