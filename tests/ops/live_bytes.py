"""What a computation keeps alive at the most, seen by a dispatch mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Live bytes of what is made inside, at the most, and the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.calls, self.seen = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.seen = {p: (ref, n) for p, (ref, n) in self.seen.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self.seen.values()))
        return out
