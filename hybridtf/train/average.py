"""An exponential average of the parameters over the steps of a run (Polyak and Juditsky 1992, in its exponential form).

Update t (from 0) keeps ``min(decay, (1 + t) / (10 + t))`` of the average, so that the random start is forgotten at once and a
short run is not judged by it. Parameters alone are averaged; buffers are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hybridtf.core import CheckpointError
from hybridtf.nn import accumulation_dtype


def decay_at(decay: float, t: int) -> float:
    """How much of the average update ``t`` (from 0) keeps."""
    return min(decay, (1 + t) / (10 + t))


class Average:
    """The average of ``model``, in float32 at least, from its weights of now on; updated every ``every`` steps."""

    def __init__(self, model: nn.Module, decay: float, every: int = 1) -> None:
        self.decay, self.every = decay, every
        self.tensors = {
            name: param.detach().to(accumulation_dtype(param.dtype), copy=True) for name, param in _averaged(model).items()
        }

    def update(self, model: nn.Module, step: int) -> None:
        """Step ``step`` (from 1) is done. The number of the update follows from the step, so that nothing else is saved."""
        if step % self.every:
            return
        averages, params = list(self.tensors.values()), _averaged(model)
        now = [params[name].detach().to(average.dtype) for name, average in self.tensors.items()]
        get_ema_multi_avg_fn(decay_at(self.decay, step // self.every - 1))(averages, now, None)

    def load(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Take an average over from disk; raises :class:`CheckpointError` naming what does not fit."""
        _copy(tensors, self.tensors, where)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model computes with the average; nothing is copied where dtypes agree."""
        params = _averaged(model)
        trained = {name: param.data for name, param in params.items()}
        try:
            for name, param in params.items():
                param.data = self.tensors[name].to(param.dtype)
            yield
        finally:
            for name, param in params.items():
                param.data = trained[name]


def assign_average(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Give the model the parameters of an average, rounded to its dtype. Raises :class:`CheckpointError`."""
    _copy(tensors, {name: param.detach() for name, param in _averaged(model).items()}, where)


def _averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.is_floating_point()}


def _copy(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor], where: str) -> None:
    for name in sorted(tensors.keys() ^ into.keys()):
        raise CheckpointError(f"{where}: {name} is {'missing' if name in into else 'not in the model'}")
    for name, target in into.items():
        value = tensors[name]
        if value.shape != target.shape:
            raise CheckpointError(f"{where}: {name} has shape {tuple(value.shape)}, the model's is {tuple(target.shape)}")
    with torch.no_grad():
        for name, target in into.items():
            target.copy_(tensors[name])
