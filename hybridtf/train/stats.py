"""What gradients, weights and activations of every layer look like in one step; nothing of it touches the numbers.

A layer is called by its place and block, as ``3.m``; layers of shared blocks have activations of their own, and their
weights stand at the first, the adapters of each at its own. Other parameters stand under the part of the model that holds
them (``stem``, ``final_norm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.models import LanguageModel, Stack
from hybridtf.tasks import Batch
from hybridtf.train.config import TrainConfig
from hybridtf.train.precision import autocast


def layer_names(stacks: Sequence[Stack]) -> list[str]:
    """``00.m`` and so on, counted through all stacks."""
    names = [name for stack in stacks for name in stack.layer_names]
    width = len(str(len(names) - 1))
    return [f"{i:0{width}d}.{name}" for i, name in enumerate(names)]


class LayerStats:
    """The statistics of one step: run it inside :meth:`watching`, then :meth:`before_update` and :meth:`after_update`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stacks = [module for module in model.modules() if isinstance(module, Stack)]
        self.names = layer_names(self.stacks)
        self.first: dict[str, str] = {}
        self.weights = self._group()
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._found: dict[str, dict[str, float | str | None]] = {}

    def _group(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by the layer that first uses them; fills ``first`` for the layers that share them later."""
        owner: dict[nn.Parameter, str] = {}
        blocks = [block for stack in self.stacks for block in stack.blocks()]
        seen: dict[nn.Module, str] = {}
        for name, block in zip(self.names, blocks, strict=True):
            if block in seen:
                self.first[name] = seen[block]
            seen.setdefault(block, name)
            for param in block.parameters():
                owner.setdefault(param, name)
        for name, adapters in zip(self.names, (part for stack in self.stacks for part in stack.adapters()), strict=True):
            owner |= dict.fromkeys(() if adapters is None else adapters.parameters(), name)
        groups: dict[str, list[nn.Parameter]] = {}
        for path, param in self.model.named_parameters():
            groups.setdefault(owner.get(param, path.partition(".")[0]), []).append(param)
        return groups

    # -- activations ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block every forward pass adds the outputs of all layers, at real tokens alone."""
        handles: list[Any] = []
        start = 0
        for stack in self.stacks:
            handles += _watch(stack, self.names[start : start + len(stack.order)], self._add)
            start += len(stack.order)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _add(self, name: str, x: Tensor, segments: Any) -> None:
        values = (x.detach() if segments is None else x.detach()[segments.real]).flatten().double()
        square = values * values
        zeros = (values == 0).sum(dtype=torch.float64)
        count = torch.full_like(zeros, values.numel())
        sums = torch.stack([count, values.sum(), square.sum(), (square * values).sum(), (square * square).sum(), zeros])
        largest = values.abs().max() if values.numel() else torch.zeros_like(zeros)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest

    # -- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self) -> None:
        """The gradients are those of the step, not yet clipped."""
        for name, params in self.weights.items():
            grads = [param.grad for param in params if param.grad is not None]
            n = sum(param.numel() for param in params)
            norm = _norm(grads)
            self._before[name] = [param.detach().clone() for param in params]
            self._found[name] = {
                "grad_norm": _finite(norm), "grad_rms": _finite(norm / math.sqrt(max(n, 1))),
                "weight_rms": _finite(_norm(params) / math.sqrt(max(n, 1))),
            }

    @torch.no_grad()
    def after_update(self) -> dict[str, Any]:
        """The step is done: the line of the log, ``{"layers": {name: {statistic: value}}}``, null where not finite."""
        for name, params in self.weights.items():
            before = self._before[name]
            change = _norm([param.detach() - old for param, old in zip(params, before, strict=True)])
            size = _norm(before)
            self._found[name]["update_ratio"] = _finite(change / size) if size else None
        layers = {name: self._found.get(name, {}) | self._layer(name) for name in self.names}
        found: dict[str, Any] = {}
        for name in self.weights:  # in the order of the model, all layers where the first of them stands
            found |= layers if name in layers else {name: self._found[name]}
        return {"layers": found | layers}

    def _layer(self, name: str) -> dict[str, float | str | None]:
        found: dict[str, float | str | None] = {"weights_of": self.first[name]} if name in self.first else {}
        if name in self._sums:
            found |= _moments(self._sums[name].tolist(), float(self._largest[name]))
        return found


def _watch(stack: Stack, names: Sequence[str], add: Callable[[str, Tensor, Any], None]) -> list[Any]:
    """Hooks on a stack and its blocks. A block that runs outside the stack's forward pass is being recomputed.

    A visit with adapters calls a view of its block, which has the block's hooks: it needs none of its own.
    """
    visit: Iterator[str] = iter(())
    segments: Any = None

    def enter(module: nn.Module, args: Any, options: Mapping[str, Any]) -> None:
        nonlocal visit, segments
        visit, segments = iter(names), options.get("segments")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal visit
        visit = iter(())

    def block(module: nn.Module, args: Any, output: Any) -> None:
        name = next(visit, None)
        if name is not None:
            add(name, output.x, segments)

    handles: list[Any] = [stack.register_forward_pre_hook(enter, with_kwargs=True), stack.register_forward_hook(leave)]
    return handles + [layer.register_forward_hook(block) for layer in dict.fromkeys(stack.blocks())]


def watch_eagerly(stats: LayerStats, model: LanguageModel, batches: Sequence[Batch], config: TrainConfig) -> None:
    """The activations of a window by forward passes of their own, for a compiled model, whose code runs no hooks.

    Random states are the caller's to set and put back; buffers are put back here.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.compiler.set_stance("force_eager"), stats.watching():
        for batch in batches:
            moved = batch.to(model.device)
            with autocast(config.precision, model.device):
                model.loss(moved.inputs, moved.targets, moved.segments)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _moments(sums: Sequence[float], largest: float) -> dict[str, float | str | None]:
    """From count, sums of the first four powers, and the number of zeros."""
    n, first, second, third, fourth, zeros = sums
    if n == 0:
        return {}
    mean = first / n
    variance = second / n - mean**2
    central = fourth / n - 4 * mean * third / n + 6 * mean**2 * second / n - 3 * mean**4
    return {
        "activation_rms": _finite(math.sqrt(second / n)), "activation_max": _finite(largest),
        "activation_zeros": _finite(zeros / n), "activation_kurtosis": _finite(central / variance**2) if variance > 0 else None,
    }


def _norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all together, in float64."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
