"""How ops over time cut a call: chunks of equal length, and spans of so many chunks that a cache, or a GPU, is filled.

Axes: b batch, t time, c chunks of a span, l places in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of the largest tensor of a span: what a CPU's cache holds, and enough to fill a GPU.
SPAN_BUDGET = 2**18
SPAN_BUDGET_GPU = 2**24


_on_cpu: bool | None = None


def by_device(device: torch.device, cpu: int, gpu: int) -> int:
    """A size of blocks: what a CPU's cache holds, or what is worth a launch."""
    return cpu if (device.type == "cpu" if _on_cpu is None else _on_cpu) else gpu


@contextmanager
def sized_for(kind: str) -> Iterator[None]:
    """Inside, blocks have the sizes of a kind of device, "cpu" or another, wherever tensors are: a plan for a GPU is made on
    shapes that a build of torch for CPUs has."""
    global _on_cpu  # and no ContextVar, which a compiler does not read
    before, _on_cpu = _on_cpu, kind == "cpu"
    try:
        yield
    finally:
        _on_cpu = before


def span_budget(device: torch.device) -> int:
    """Elements that the largest tensor of a span may have."""
    return by_device(device, SPAN_BUDGET, SPAN_BUDGET_GPU)


def chunks_at_once(elements: int, device: torch.device) -> int:
    """How many chunks a span may have whose largest tensor has ``elements`` a chunk. Sizes may be a compiler's symbols."""
    at_once: int = torch.sym_max(1, span_budget(device) // torch.sym_max(1, elements))
    return at_once


def power_of_two(chunk_size: int) -> int:
    """The largest that is not more."""
    return 1 << (chunk_size.bit_length() - 1)


def chunk_length(chunk_size: int, n_tokens: int) -> int:
    """Tokens of a chunk: a power of 2, at most ``chunk_size``, and no longer than the call needs."""
    return min(power_of_two(chunk_size), 1 << max(n_tokens - 1, 0).bit_length())


class Span(NamedTuple):
    """Chunks of equal length that are computed side by side."""

    start: int
    n_chunks: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.n_chunks * self.length

    def cut(self, x: Tensor) -> Tensor:
        """This span of ``x`` (b t ...) as (b c l ...)."""
        part = x if self.stop - self.start == x.shape[1] else x[:, self.start : self.stop]
        return part.reshape(x.shape[0], self.n_chunks, self.length, *x.shape[2:])


def spans_of(t: int, length: int, at_once: int) -> list[Span]:
    """Spans over ``t`` tokens: ``at_once`` chunks of ``length`` each, and what is shorter than a chunk as a span of its own."""
    full = t // length
    spans = [Span(i * length, min(at_once, full - i), length) for i in range(0, full, at_once)]
    return [*spans, Span(full * length, 1, t % length)] if t % length else spans


def count_spans(t: int, length: int, at_once: int) -> int:
    """How many spans :func:`spans_of` gives, as arithmetic that holds for a compiler's symbols too."""
    full = t // length
    return (full + at_once - 1) // at_once + (t + length - 1) // length - full
