"""Calls of ``path_attention`` for the contract kit: grouped heads, with and without a decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.core.segments import Segments
from hybridtf.ops.attention.cases import HEADS, KEY_HEADS, draw, masked
from hybridtf.ops.documents import mask_pads


def _draw(decay: bool, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {**draw(4, 3, (), gen, b, t).timed, "w": F.normalize(randn(gen, b, t, KEY_HEADS, 4), dim=-1)}
    timed["beta"] = 2 * randn(gen, b, t, KEY_HEADS).sigmoid()
    return OpInputs({**timed, "log_f": F.logsigmoid(randn(gen, b, t, HEADS))} if decay else timed)


def _run(op: Callable[..., Tensor], inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]) -> Tensor:
    given, mask = masked(inputs, segments, options)
    w, beta = (mask_pads(inputs.timed[name], segments) for name in ("w", "beta"))
    if "log_f" in inputs.timed:
        sums = mask_pads(inputs.timed["log_f"], segments).cumsum(1)
        mask = replace(mask, q_decay=sums, k_decay=sums)
    return op(*given, w, beta, mask)


CASES: tuple[OpCase, ...] = tuple(
    OpCase("path_attention", name, partial(_draw, decay), sizes={"head_dim": 4, "v_dim": 3}, run=_run)
    for name, decay in (("plain", False), ("decay", True))
)
