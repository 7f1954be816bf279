"""The memory of titans-pytorch, given queries, keys, values and rates instead of what it would make of a layer's input."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import torch
from torch import Tensor, nn

from tests.peers import peer


class Tensors(dict):
    """What titans-pytorch asks of a ``TensorDict``."""

    def apply(self, function):
        return Tensors({name: function(x) for name, x in self.items()})

    def mul(self, factor):
        return self.apply(lambda x: x * factor)

    def clone(self):
        return self.apply(torch.clone)

    def zero_(self):
        return self.apply(torch.zeros_like)


class Take(nn.Module):
    """Channels of what it is given, instead of a projection of it."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.place = slice(start, stop)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.place]


def published() -> ModuleType:
    """Its module of the memory. It needs more of its package, and two others, of which einx serves an option not used here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # assoc-scan compiles a function by torch.jit
        needed = {
            "titans_pytorch": ModuleType("titans_pytorch"), "einx": ModuleType("einx"), "tensordict": ModuleType("tensordict"),
            "titans_pytorch.memory_models": peer("titans_pytorch/memory_models.py"), "assoc_scan": peer("assoc_scan"),
        }
        needed["tensordict"].TensorDict = Tensors
        before = {name: sys.modules.get(name) for name in needed}
        sys.modules.update(needed)
        try:
            return peer("titans_pytorch/neural_memory.py")
        finally:
            for name, module in before.items():
                sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def by_titans_pytorch(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_eta: Tensor, log_a: Tensor, layers: list[Tensor], m: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y (b t h p), the memory and the momentum after it (b h n), of q, k, v (b t h p), rates (b t h) and the layers of M0, each
    (h in out). With the paper's loss, a sum, no norm around the memory, and weights that are updated at each batch of m."""
    theirs, (h, p) = published(), q.shape[2:]
    hidden = layers[0].shape[2]
    memory = theirs.NeuralMemory(
        h * p, chunk_size=1, batch_size=m, dim_head=p, heads=h, model=theirs.MemoryMLP(p, len(layers), hidden / p),
        pre_rmsnorm=False, mem_model_norm_add_residual=False,
        store_memory_loss_fn=lambda found, target: (found - target).square().sum(-1),
    ).double()
    memory.retrieve_gate, memory.combine_heads = None, nn.Identity()
    memory.to_queries, memory.to_keys, memory.to_values = (Take(i * h * p, (i + 1) * h * p) for i in range(3))
    for i, part in enumerate((memory.to_adaptive_step, memory.to_momentum, memory.to_decay_factor)):
        part[0] = Take(3 * h * p + i * h, 3 * h * p + (i + 1) * h)
    del memory.memory_model_parameters
    memory.memory_model_parameters = layers
    alpha = torch.log1p(-log_a.exp()) - log_a
    logits = (torch.logit(theta), log_eta - torch.log1p(-log_eta.exp()), alpha)
    y, state = memory(torch.cat([*(x.flatten(2) for x in (q, k, v)), *logits], -1))
    last, momentum = state.states
    flat = (torch.cat([x.flatten(-2) for x in part.values()], -1).view(q.shape[0], h, -1) for part in (last, momentum))
    return y.unflatten(-1, (h, p)), *flat
