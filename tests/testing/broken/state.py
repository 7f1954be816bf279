"""Mixers whose state is not what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Fixed, Growing, Law, Segments, State, StateLeaf, with_history
from hybridtf.testing.doubles import DeclaredMixer, EdgesMixer, EmaConfig, EmaMixer, SumMixer


class WritesOldState(EmaMixer):
    """Goes on using the leaf that it was given."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        old = Fixed({"h": state["h"]}, state.length)
        y, new = super()._step(x, segments, old)
        with torch.no_grad():
            state["h"].copy_(new["h"])
        state._length = new.length
        return y, state


class IgnoresKeep(EmaMixer):
    def forward(self, x: Tensor, *, keep: int = 0, **options: Any) -> Any:
        return super().forward(x, **options)


class CropsWrong(EmaMixer):
    """Its snapshots are one token late."""

    def forward(self, x: Tensor, *, keep: int = 0, **options: Any) -> Any:
        y, state = super().forward(x, keep=keep, **options)
        if state is not None and state.past:
            state.past["h"] = torch.cat([state.past["h"][:, 1:], state["h"][:, None]], 1)
        return y, state


class Miscounted(Fixed):
    def nbytes(self) -> int:
        return 8


class CountsWrong(EmaMixer):
    def forward(self, x: Tensor, *, state: Any = None, **options: Any) -> Any:
        y, new = super().forward(x, state=state, **options)
        return y, None if state is None else Miscounted(new.data, new.length, new.past, new.past_length)


class CountsTwice(EmaMixer):
    """Its length is twice the number of tokens."""

    def forward(self, x: Tensor, *, state: Any = None, **options: Any) -> Any:
        y, new = super().forward(x, state=state, **options)
        return y, None if state is None else Fixed(new.data, new.length + x.shape[1])


class LooseTensor(EmaMixer):
    """Carries a tensor outside of the leaves."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"leaf": super().init_state(batch_size, max_len), "count": torch.zeros(batch_size)}

    def forward(self, x: Tensor, *, state: Any = None, **options: Any) -> Any:
        inner = None if state is None else state["leaf"]
        y, new = self._carried(x, inner, **options)
        return y, None if state is None else {"leaf": new, "count": state["count"] + 1}

    def _carried(self, x: Tensor, state: Any, *, segments: Any = None, context: Any = None, keep: int = 0) -> Any:
        start = super().init_state(x.shape[0]) if state is None else state
        return with_history(self._step, x, segments, start, keep, super().init_state)


class GrowsInSilence(EmaMixer):
    """Keeps all its inputs in a leaf of fixed size."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        fixed = super().init_state(batch_size, max_len)
        return Fixed({**fixed.data, "seen": fixed["h"][:, :0]}, fixed.length)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        seen = torch.cat([state["seen"], x.flatten(1).to(state["seen"])], 1)
        y, new = super()._step(x, segments, state)
        return y, Fixed({**new.data, "seen": seen}, new.length)


class OtherFormForOne(EmaMixer):
    """Carries another dtype after a single token."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        wide = torch.promote_types(self.logit.dtype, torch.float32)
        y, new = super()._step(x, segments, Fixed({"h": state["h"].to(wide)}, state.length))
        return y, Fixed({"h": new["h"].float()}, new.length) if x.shape[1] == 1 else new


class SharedSnapshot(Fixed):
    def snapshot(self) -> StateLeaf:
        return self

    restore = snapshot  # type: ignore[assignment]

    def reorder(self, index: Tensor) -> SharedSnapshot:
        return SharedSnapshot({k: v[: len(index)] for k, v in self.data.items()}, self.length[: len(index)])


class SharesCopies(EmaMixer):
    """Its copies of a state are the state."""

    def forward(self, x: Tensor, *, state: Any = None, **options: Any) -> Any:
        held = None if state is None else state["h"]
        y, new = super().forward(x, state=state, **options)
        if held is None:
            return y, None
        with torch.no_grad():
            held.copy_(new["h"])
        return y, SharedSnapshot({"h": held}, new.length)


class LiesAboutCrop(EmaMixer):
    cannot: Mapping[Law, str] = {"crop": "a recurrence cannot go back"}


class LiesAboutLosses(EdgesMixer):
    losses_cannot: Mapping[Law, str] = {"segment": "they are over all documents"}


class LiesAboutCompile(EmaMixer):
    cannot: Mapping[Law, str] = {"compile": "too clever"}


class LiesAboutMaxLen(SumMixer):
    uses_max_len = True


class HidesMaxLen(DeclaredMixer):
    uses_max_len = False


class LosesMaxLen(DeclaredMixer):
    def forward(self, x: Tensor, **options: Any) -> Any:
        y, state = super().forward(x, **options)
        if state is not None:
            state = Growing(state.data, state.length, static=state.static)
        return y, state


class ForgetsToReorder(Fixed):
    def reorder(self, index: Tensor) -> ForgetsToReorder:
        moved = {name: value if name == "z" else value[index] for name, value in self.data.items()}
        return ForgetsToReorder(moved, self.length[index])


class ReordersOneOfTwo(EmaMixer):
    """Of two tensors in its state, one stays where it was."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        fixed = super().init_state(batch_size, max_len)
        return ForgetsToReorder({"h": fixed["h"], "z": fixed["h"].clone()}, fixed.length)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, Fixed({"h": state["h"]}, state.length))
        z = new["h"] * 0.5
        return y + 0.1 * self.out_proj(state["z"].to(y.dtype))[:, None], ForgetsToReorder({"h": new["h"], "z": z}, new.length)


class CropsOneTooMany(Growing):
    def crop(self, n: Any) -> Any:
        return super().crop(n + 1)


class CropsTooMuch(SumMixer):
    """Asked to forget n tokens it forgets one more."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        y, new = super().forward(x, **options)
        return y, None if new is None else CropsOneTooMany(new.data, new.length, static=new.static)


class Uninitialised(EmaMixer):
    """Its first state is whatever stood in memory."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        fixed = super().init_state(batch_size, max_len)
        return Fixed({"h": torch.empty_like(fixed["h"])}, fixed.length)


class CounterOnTheModule(EmaMixer):
    """Counts its calls beside the state."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        with torch.no_grad():
            self.calls += 1
        return y * (1 + 0.001 * float(self.calls)), new


BROKEN: dict[str, tuple[str, str]] = {
    "WritesOldState": ("dead_state", "wrote into the state"),
    "IgnoresKeep": ("crop", "made with keep=3 refuses"),
    "CropsWrong": ("crop", "crop (no padding"),
    "CountsWrong": ("state_bytes", "says 8 bytes"),
    "CountsTwice": ("state_bytes", "after 4 tokens the state says length [8, 8]"),
    "LooseTensor": ("state_bytes", "outside of Growing, Ring and Fixed"),
    "GrowsInSilence": ("state_bytes", "grew from"),
    "OtherFormForOne": ("structure", "a call of 1 tokens gives the state"),
    "SharesCopies": ("snapshot", "shares memory"),
    "LiesAboutCrop": ("crop", "declares that it cannot crop"),
    "LiesAboutLosses": ("segment", "declares that its losses cannot segment"),
    "LiesAboutCompile": ("compile", "declares that it cannot compile"),
    "LiesAboutMaxLen": ("cut", "declares uses_max_len, but gives the same"),
    "HidesMaxLen": ("cut", "max_len=16"),
    "LosesMaxLen": ("cut", "cut law broken for pieces of [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] tokens, max_len=16"),
    "ReordersOneOfTwo": ("reorder", "reorder"),
    "CropsTooMuch": ("crop", "crop"),
    "Uninitialised": ("structure", "init_state"),
    "CounterOnTheModule": ("cut", "a call with an empty state differs"),
}
