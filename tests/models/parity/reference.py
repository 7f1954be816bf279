"""Tiny transformers models in strict float64, with weights that hide no term."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hybridtf.interop.strict import StrictFloat64
from hybridtf.models.weights import canonical_tensors


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reference(name: str, config: Any, *, unit_offset: bool) -> nn.Module:
    """The model of class ``name``; ``unit_offset``: its norms multiply by 1 + weight."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped ones cannot do float64
    with default_dtype(torch.float64), StrictFloat64():
        model = getattr(transformers, name)(config)
    model = model.to(torch.float64).eval()
    redraw(model, unit_offset=unit_offset)
    return model


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with StrictFloat64():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@torch.no_grad()
def redraw(model: nn.Module, *, unit_offset: bool) -> None:
    """No parameter is left at 0 or 1, so that a forgotten term shows. Buffers are constants but for the selection bias."""
    generator = torch.Generator().manual_seed(7)
    drawn = {name: p for name, p in canonical_tensors(model).items() if isinstance(p, nn.Parameter) or "correction" in name}
    for name, p in drawn.items():
        p.copy_(_draw(name, p, generator, -0.45 if unit_offset else 0.55))


def _draw(name: str, p: Tensor, generator: torch.Generator, norms_from: float) -> Tensor:
    def between(low: float, high: float) -> Tensor:
        return torch.rand(p.shape, generator=generator, dtype=torch.float64) * (high - low) + low

    if name.endswith("A_log"):
        return between(math.log(0.2), math.log(6.0))
    if name.endswith(("dt_bias", "dt_proj.bias")):  # steps of 0.02 to 0.9
        dt = between(math.log(0.02), math.log(0.9)).exp()
        return dt + torch.log(-torch.expm1(-dt))
    if name.endswith("recurrent_param"):  # decays of 0.5 to 0.98 at a half-open gate
        return between(-4.5, -1.5)
    if name.endswith(".D"):
        return between(0.55, 1.45)
    if "norm" in name:
        return between(norms_from, norms_from + 0.9)
    if name.endswith("sinks"):
        return between(-1.0, 1.0)
    if name.endswith("correction_bias"):  # beside scores between 0 and 1
        return between(-0.2, 0.2)
    if name.endswith("bias") or p.ndim == 1:
        return between(0.05, 0.35) * between(-1.0, 1.0).sign()  # of one sign they would steer every token alike
    size = 3.0 if name.endswith(("router.weight", ".gate.weight")) else 1.0  # every expert shall be chosen now and then
    return between(-size, size) * (3 / _fan_in(name, p)) ** 0.5


def _fan_in(name: str, p: Tensor) -> int:
    """Of one matrix of a stack, where there is a stack."""
    if "conv" in name:
        return p[0].numel()
    return min(p.shape[1:])
