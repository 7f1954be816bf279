"""Foreign layers as judges to 1e-9."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StrictFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: transformers casts norms, softmax, routers, tables and scans by hand."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "float" and args and isinstance(args[0], Tensor):
            return args[0].to(torch.float64)
        swap = lambda v: torch.float64 if v is torch.float32 else v  # noqa: E731
        return func(*[swap(a) for a in args], **{k: swap(v) for k, v in (kwargs or {}).items()})
