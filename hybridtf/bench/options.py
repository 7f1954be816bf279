"""What a comparison measures, how much of it, and on how many processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridtf.bench.extrapolation import MULTIPLES
from hybridtf.bench.noise import MIN_ROUNDS
from hybridtf.core import ConfigError, TaskConfig
from hybridtf.cost.phases import Phase
from hybridtf.train.progress import Style


@dataclass(frozen=True)
class CompareOptions:
    """What is measured, and how much of it.

    ``tasks``: by name, instead of the recipes' own; each recipe is trained on each of them. ``learning_rates``: instead of
    the recipes' own; of several the best one on a third side of the task is chosen (see ``bench/README.md``).
    ``choose_only``: leave ``sweep`` records, the scores on the third side, and nothing else; what is held out is not met, so
    that recipes themselves can be chosen by them. ``workers``:
    trainings at once, each in a process of its own with a share of the cores; 1: in this process. ``timeout_s``: a training
    with its measurements that takes longer is ended and recorded as ``timed_out``; it runs in a process of its own.
    ``steps``: optimizer steps instead of what the recipes say. ``device``: None takes a GPU if there is one.
    ``eval_tokens``, ``stride``: see :func:`~hybridtf.bench.quality.measure_quality`. ``max_documents``: that
    extrapolation reads. ``context``: the prompt that prefill and decode are measured with. ``limit_bytes``: also
    search the longest length whose peak stays within it, for each of ``memory_phases`` (on a CPU predicted, which
    takes a while). ``repeats``: rounds in which speed is timed; fewer bear no verdict. """

    tasks: Mapping[str, TaskConfig] | None = None
    learning_rates: Sequence[float] = ()
    choose_only: bool = False
    workers: int = 1
    timeout_s: float | None = None
    steps: int | None = None
    device: torch.device | str | None = None
    stride: int | None = None
    eval_tokens: int | None = None
    multiples: Sequence[int] = MULTIPLES
    max_documents: int | None = 16
    context: int = 1024
    repeats: int = MIN_ROUNDS
    warmup: int = 2
    speed_phases: Sequence[Phase] = ("train", "prefill", "decode")
    memory_phases: Sequence[Phase] = ("train", "decode")
    limit_bytes: int | None = None
    progress: Style = "auto"
    """How training shows itself; nothing with several workers."""

    def __post_init__(self) -> None:
        rates = list(self.learning_rates)
        if any(not 0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise ConfigError(f"learning_rates must differ and be above 0, and finite, got {rates}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be finite and above 0, got {self.timeout_s}; leave it out for no limit")
        if self.workers < 1:
            raise ConfigError(f"workers must be at least 1, got {self.workers}")
        if self.tasks is not None and not self.tasks:
            raise ConfigError("tasks names no task; leave it out for the recipes' own")

    @property
    def chosen_device(self) -> torch.device | str:
        """The device, found where none was named."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")
