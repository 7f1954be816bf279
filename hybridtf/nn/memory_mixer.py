"""What recurrent mixers share whose heads write into a memory: projections, short convolutions over them, and the state.

Axes: b batch, t time, d d_model, c channels of a projection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from hybridtf.core import Edges, Fixed, RecurrentMixer, Segments, SequenceMixerConfig, State
from hybridtf.core.kernels import OpKernel
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.short_conv import ShortConvs


class MemoryConfig(SequenceMixerConfig):
    """What mixers with a memory are told of their output norm, their op and their convolutions."""

    eps: float = Field(default=1e-5, gt=0)
    """Of the output norm."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"


class MemoryMixer(RecurrentMixer):
    """A subclass makes its projections, its op and ``conv``, and gives :meth:`memory_shapes` and :meth:`recur`.

    Its state: ``memory``, a ``Fixed`` in float32 at least, and the windows of ``conv``, where it has convolutions.
    """

    roles: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    """What is projected from x, each by the module ``<role>_proj``."""
    op: ClassVar[str]
    """The attribute that holds the op: it knows dtype and device."""

    conv: ShortConvs | None

    @abstractmethod
    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row's tensors, by name."""

    @abstractmethod
    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x (b t d) and what was projected of it (b t c) by role, convolved, to the output (b t d) and the memory after it."""

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """(b t d) to (b t c) by role."""
        return {role: getattr(self, f"{role}_proj")(x) for role in self.roles}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        op: OpKernel = getattr(self, self.op)
        where: dict[str, Any] = {"dtype": accumulation_dtype(op.dtype), "device": op.device}
        state: dict[str, State] = {"memory": Fixed.empty(batch_size, self.memory_shapes(), max_len=max_len, **where)}
        return state if self.conv is None else {**state, "conv": self.conv.init_state(batch_size)}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Any, ...]:
        return self.remember(x, segments, state)

    def remember(self, x: Tensor, segments: Segments | None, state: State | None, **more: Any) -> tuple[Tensor, State | None]:
        """The output (b t d), and the state after it (None without one); ``more`` goes to :meth:`recur`."""
        given, windows = self.projected(x), None
        if self.conv is not None:
            given, windows = self.conv(given, segments, None if state is None else state["conv"])
        memory: Fixed | None = None if state is None else state["memory"]
        y, last = self.recur(x, given, segments, memory, **more)
        if memory is None:
            return y, None
        after = {"memory": memory.advance(dict(last), segments, x.shape[1])}
        return y, after if windows is None else {**after, "conv": windows}
