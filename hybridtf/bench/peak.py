"""The peak of a phase on a GPU, and what the allocator and the driver hold beyond it."""

from __future__ import annotations

from typing import Any

import torch

from hybridtf.core import DataError


class AllocatorPeak:
    """The CUDA allocator's peak of one phase. It is only told once it was reset at the phase's start: a peak that was not
    is that of something else, such as building the model. ``before``: allocated by others, and not counted."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._reset = False
        self.before = torch.cuda.memory_allocated(device)
        self._events = self._counts()

    def reset(self) -> None:
        """The phase begins here."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._reset = True

    def allocated(self) -> int:
        """Bytes at the peak, without those of before; the next one needs another :meth:`reset`. Raises
        :class:`DataError` for a peak that was not reset."""
        self._need_reset()
        torch.cuda.synchronize(self._device)
        self._reset = False
        return torch.cuda.max_memory_allocated(self._device) - self.before

    def rest(self) -> dict[str, Any]:
        """What is not tensors, at its most: ``reserved`` by the allocator, of that ``unused`` (fragments, cache), how
        often it ran short (``alloc_retries``) or out (``ooms``), and the ``driver``'s own figure of this device in
        use, with what the allocator does not see. To be asked before :meth:`allocated`."""
        self._need_reset()
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        retries, ooms = (now - then for now, then in zip(self._counts(), self._events, strict=True))
        return {
            "reserved": reserved, "unused": reserved - torch.cuda.max_memory_allocated(self._device),
            "alloc_retries": retries, "ooms": ooms, "driver": total - free,
            "beyond_allocator": total - free - torch.cuda.memory_reserved(self._device),
        }

    def _need_reset(self) -> None:
        if not self._reset:
            raise DataError(
                "the peak was not reset at the start of the phase: it may be that of what ran before, and is no measurement"
            )

    def _counts(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))
