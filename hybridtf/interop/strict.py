"""Reference models that compute in float64 alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class StrictFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: transformers casts norms, softmax, routers, tables and scans by hand."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "float" and args and isinstance(args[0], Tensor):
            return args[0].to(torch.float64)
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def strict_float64() -> Iterator[None]:
    """Inside, models are built and run in float64, tables of theirs included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with StrictFloat64():
            yield
    finally:
        torch.set_default_dtype(before)
