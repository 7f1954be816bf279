"""Mixers that break under what others do to them: adapters, compilers, kernels, meshes, low precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core import EdgeSpec, Extras, Fixed, Kernel, Segments, State, always
from hybridtf.testing.doubles import EdgesMixer, EmaMixer, MeshMixer, ema_matrix


class RawWeight(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (y if torch.is_grad_enabled() else y * 0 + self._raw(x, segments, state, new)), new

    def _raw(self, x: Tensor, segments: Segments | None, state: State, new: State) -> Tensor:
        u = (x @ self.in_proj.weight.T).to(new["h"].dtype)
        real = torch.ones(x.shape[:2], dtype=torch.bool)
        y, _ = ema_matrix(u, self.logit.to(u).sigmoid(), state["h"], real, real.long() * 0)
        return self.out_proj(y.to(x.dtype))


class GraphBreak(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (y + 0 if float(x.detach().sum()) > 0 else y), new


class CountedLeaf(Fixed):
    """Counts calls in a Python number: a new graph at each step."""

    calls = 0


class CompilesAgain(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        out = CountedLeaf(new.data, new.length)
        out.calls = getattr(state, "calls", 0) + 1
        return (y * 1 if out.calls % 2 else y + 0 * out.calls), out


class WrongKernel(EmaMixer):
    """Pins the kernel below."""


class MeshTwice(MeshMixer):
    def forward(self, x: Tensor, **options: Any) -> Any:
        y, state = super().forward(x, **options)
        return (2 * y if self.group is not None else y), state


class LiesAboutEdges(EdgesMixer):
    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {"double_gate": EdgeSpec((2, 3))}


class ReadsUntold(EdgesMixer):
    reads = ("embedding", "trace")


class NoExample(ReadsUntold):
    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {"trace": EdgeSpec((2,), torch.int64)}


class WrongExample(ReadsUntold):
    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {"trace": EdgeSpec((2,), torch.int64, lambda generator, b, t: torch.zeros(b, t, 2))}


class NoExtras(EdgesMixer):
    """Writes nothing of what it declares."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        y, state, extras = super().forward(x, **options)
        return y, state, Extras(losses=extras.losses)


class Rough(EmaMixer):
    """Rounds so that bfloat16 is far away."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        shift = 300.0 if x.dtype == torch.bfloat16 else 0.0
        y, new = super()._step((x + shift) - shift, segments, state)
        return y, new


def load_wrong() -> Any:
    return ema_forgets_initial


def ema_forgets_initial(x: Tensor, decay: Tensor, initial: Tensor, real: Tensor, document: Tensor) -> Any:
    """The matrix form without the initial state's share of the output."""
    y, _ = ema_matrix(x, decay, torch.zeros_like(initial), real, document)
    return y, ema_matrix(x, decay, initial, real, document)[1]


WRONG = Kernel("double_ema", "wrong", -5, always, load_wrong)


BROKEN: dict[str, tuple[str, str]] = {
    "RawWeight": ("lora", "unmerged differs from merged in prefill"),
    "GraphBreak": ("compile", "torch.compile(fullgraph=True) fails"),
    "CompilesAgain": ("compile", "compiles again"),
    "WrongKernel": ("kernels", "kernel 'wrong' and the reference differ"),
    "MeshTwice": ("mesh", "on a mesh of one rank"),
    "LiesAboutEdges": ("shape", "the edge 'double_gate' is said to be (b t 2 3), and is torch.float32 (2, 7, 16)"),
    "ReadsUntold": ("shape", "reads the edge 'trace', and does not say in edge_specs() how it looks"),
    "NoExample": ("shape", "the edge 'trace' of torch.int64 needs an example, draw"),
    "WrongExample": ("shape", "the edge 'trace' is said to be (b t 2) torch.int64, and is torch.float32 (2, 7, 2)"),
    "NoExtras": ("shape", "declares writes"),
    "Rough": ("bf16", "far from float32"),
}
