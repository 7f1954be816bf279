"""Mixers that are built, filled, copied or saved wrongly."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, Segments, State, init
from hybridtf.testing.doubles import EmaConfig, EmaMixer


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


BROKEN: dict[str, tuple[str, str]] = {
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
}
