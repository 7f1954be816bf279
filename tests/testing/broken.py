"""Components that each break one law, for the kit to find."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Extras,
    Fixed,
    Growing,
    Kernel,
    Law,
    Norm,
    NormConfig,
    ParamSpec,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    StateLeaf,
    always,
    init,
    with_history,
)
from hybridtf.testing.doubles import (
    CrossMixer,
    DeclaredMixer,
    EdgesMixer,
    EmaConfig,
    EmaMixer,
    MeshMixer,
    SumMixer,
    WindowConfig,
    WindowMixer,
    ema_matrix,
)


class BrokenConfig(SequenceMixerConfig):
    """Builds the class of this name in :data:`MIXERS`."""

    type: Literal["broken"] = "broken"
    variant: str = "Honest"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> SequenceMixer:
        cls = MIXERS[self.variant]
        if issubclass(cls, WindowMixer):
            return cls(WindowConfig(), ctx)
        if issubclass(cls, EmaMixer):
            return cls(EmaConfig(kernel="wrong" if self.variant == "WrongKernel" else "auto"), ctx)
        return cls(ctx)  # type: ignore[call-arg]


class Honest(EmaMixer):
    """Breaks nothing."""


# -- time ------------------------------------------------------------------------------------------------------------


class SeesFuture(SumMixer):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.causal = False


class BlindAhead(SumMixer):
    """Built for both ways, looks back only."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.causal = True


class DropsState(WindowMixer):
    def forward(self, x: Tensor, *, segments: Any = None, state: Any = None, context: Any = None, keep: int = 0) -> Any:
        y, _ = super().forward(x, segments=segments)
        return y, None if state is None else state.push({"u": self.in_proj(x)}, segments, keep=keep)


class WindowTooWide(WindowMixer):
    """Sees further back than the ring keeps."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        self.window += 2
        try:
            return super().forward(x, **options)
        finally:
            self.window -= 2


class LeavesBuffer(SumMixer):
    """Moves to another buffer at each call."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        y, state = super().forward(x, **options)
        return y, None if state is None else state.clone()


class LowState(EmaMixer):
    """Carries float32 in a float64 model."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y, Fixed({"h": new["h"].float().to(new["h"].dtype)}, new.length)


class ForgetsContext(CrossMixer):
    """Later calls see nothing of the context."""

    def forward(self, x: Tensor, *, state: Any = None, context: Any = None, **options: Any) -> Any:
        if state is not None and context is None:
            nothing = {**state.constant, "document": state["document"] * 0}
            state = Fixed(state.data, state.length, constant=nothing)
        return super().forward(x, state=state, context=context, **options)


class FailsOnNothing(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        x[:, -1]  # no last token in an empty call
        return super()._step(x, segments, state)


class TrainsOtherwise(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return (1.001 * y if torch.is_grad_enabled() else y), new


class ReturnsFloat64(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y.double(), new


# -- segments --------------------------------------------------------------------------------------------------------


class EmaParts(EmaMixer):
    """An average whose idea of real tokens and documents can be spoilt."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real = torch.ones(x.shape[:2], dtype=torch.bool) if segments is None else segments.real
        document = torch.zeros_like(real, dtype=torch.int64) if segments is None else segments.starts.long().cumsum(1)
        return real, document

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        real, document = self.documents(x, segments)
        y, h = self.ema(self.in_proj(x), self.logit.sigmoid(), state["h"], real, document, n_tokens=x.shape[1])
        return self.out_proj(y), state.advance({"h": h}, segments, x.shape[1])


class PadsDecay(EmaParts):
    """A pad is a token of zeros."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        if segments is not None:
            x = torch.where(segments.real[..., None], x, torch.zeros_like(x))
        return super()._step(x, segments, state)

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        return torch.ones_like(real), document


class IgnoresSegments(EmaParts):
    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        return super().documents(x, None)


class IgnoresContinues(EmaParts):
    """Takes every row for a continued one."""

    def documents(self, x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
        real, document = super().documents(x, segments)
        if segments is not None:
            document = document - (~segments.continues & (segments.first_id > 0)).long()[:, None]
        return real, document


class CountsPads(EdgesMixer):
    """Its loss has the pads in it."""

    def forward(self, x: Tensor, *, edges: Edges, segments: Any = None, **options: Any) -> Any:
        return super().forward(x, edges=edges, segments=None, **options)


class OneContext(CrossMixer):
    """Every document sees the context of all."""

    def project(self, context: Any) -> dict[str, Tensor]:
        out = super().project(context)
        return {**out, "document": out["document"].clamp(max=1)}


class NaNWithoutKeys(SumMixer):
    """A token that sees nothing divides by zero."""

    def forward(self, x: Tensor, *, segments: Any = None, **options: Any) -> Any:
        y, state = super().forward(x, segments=segments, **options)
        if segments is not None:
            y = y / segments.real.any(1).to(y.dtype)[:, None, None]
        return y, state


# -- state -----------------------------------------------------------------------------------------------------------


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


# -- building --------------------------------------------------------------------------------------------------------


class UnusedParameter(EmaMixer):
    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.spare = nn.Linear(ctx.d_model, 2, **ctx.factory)


class GlobalRandom(EmaMixer):
    def param_specs(self) -> dict[str, ParamSpec]:
        return {"logit": ParamSpec("state", lambda tensor, generator: tensor.copy_(torch.randn(tensor.shape)))}


class SameSeed(EmaMixer):
    """Does not depend on the seed."""

    def param_specs(self) -> dict[str, ParamSpec]:
        def fill(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.copy_(torch.linspace(0, 1, tensor.numel()).view_as(tensor))

        return {"logit": ParamSpec("state", fill)}


class DrawsSecretly(EmaMixer):
    """Says that its start is a pattern, and draws it."""

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"logit": ParamSpec("state", init.normal(1.0), drawn=False)}


class OnTheCPU(EmaMixer):
    """Makes a parameter without asking where."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, dtype=ctx.param_dtype)


class LostBuffer(EmaMixer):
    """A buffer that is only right where it was first made."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.register_buffer("table", torch.arange(1.0, 4.0, **ctx.factory), persistent=False)


class HasLambda(EmaMixer):
    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.act = lambda x: x


class RemembersInput(EmaMixer):
    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        self.last = x.detach()
        return super()._step(x, segments, state)


class SharedDeepcopy(EmaMixer):
    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDeepcopy:
        return copy.copy(self)


class NotSaved(EmaMixer):
    """A weight that state_dict does not know."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        full = super().state_dict(*args, **kwargs)
        full.pop("logit", None)
        return full


# -- outside ---------------------------------------------------------------------------------------------------------


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

MIXERS: dict[str, type[SequenceMixer]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, SequenceMixer) and cls.__module__ == __name__
}

BROKEN: dict[str, tuple[str, str]] = {
    "SeesFuture": ("causal", "looks into the future: output at t="),
    "BlindAhead": ("causal", "does not see ahead"),
    "DropsState": ("cut", "cut law broken"),
    "WindowTooWide": ("cut", "cut law broken"),
    "LeavesBuffer": ("cut", "must stay in its buffer"),
    "LowState": ("cut", "cut law broken"),
    "ForgetsContext": ("cut", "cut law broken"),
    "FailsOnNothing": ("empty", "IndexError"),
    "TrainsOtherwise": ("eval", "gradients on differ from gradients off"),
    "ReturnsFloat64": ("shape", "returns the dtype it was given"),
    "PadsDecay": ("segment", "segment law broken"),
    "IgnoresSegments": ("segment", "segment law broken"),
    "IgnoresContinues": ("segment", "segment law broken"),
    "CountsPads": ("segment", "pads must not count"),
    "OneContext": ("segment", "segment law broken"),
    "NaNWithoutKeys": ("segment", "not finite"),
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
    "UnusedParameter": ("gradients", "parameters without gradient: ['spare.weight', 'spare.bias']"),
    "GlobalRandom": ("init", "global generator"),
    "SameSeed": ("init", "do not depend on the seed: ['logit']"),
    "DrawsSecretly": ("init", "depend on the seed although declared as not drawn: ['logit']"),
    "OnTheCPU": ("meta", "out_proj.weight"),
    "LostBuffer": ("meta", "table"),
    "HasLambda": ("copies", "no lambda"),
    "RemembersInput": ("copies", "nothing hangs on modules"),
    "SharedDeepcopy": ("copies", "shares memory"),
    "NotSaved": ("save_load", "logit"),
    "RawWeight": ("lora", "unmerged differs from merged in prefill"),
    "GraphBreak": ("compile", "torch.compile(fullgraph=True) fails"),
    "CompilesAgain": ("compile", "compiles again"),
    "WrongKernel": ("kernels", "kernel 'wrong' and the reference differ"),
    "MeshTwice": ("mesh", "on a mesh of one rank"),
    "NoExtras": ("shape", "declares writes"),
    "Rough": ("bf16", "far from float32"),
}
"""The law that each one breaks, and what the message must say."""


class BatchNormConfig(NormConfig):
    """Normalises over the tokens: no norm in the sense of the contract."""

    type: Literal["broken_norm"] = "broken_norm"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        return BatchNorm(ctx)


class BatchNorm(Norm):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight
