"""Reference models that compute in float64 alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class StrictFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: transformers casts norms, softmax, routers, tables and scans by hand."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "float" and args and isinstance(args[0], Tensor):
            return args[0].to(torch.float64)
        swap = lambda v: WIDER.get(v, v) if isinstance(v, torch.dtype) else v  # noqa: E731
        return func(*[swap(a) for a in args], **{k: swap(v) for k, v in (kwargs or {}).items()})
