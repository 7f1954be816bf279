"""What a query computes from the keys that it chose: gather them, a function of both, some queries at a time.

An op's author writes the function of some queries and their gathered keys as plain differentiable torch. Both passes are custom
operators; the backward gathers and computes each part again and lets autograd differentiate that one, so that memory is linear
in length.

Axes: b batch, t queries, s slots of keys, n choices, m queries of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.gradients import autograd_inside, count_flops, first_order
from hybridtf.ops.spans import by_device

_BUDGET_CPU, _BUDGET_GPU = 2**20, 2**26
_LEAST = 16

Part: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, float], tuple[Tensor, ...]]
"""``part(asked, keys, seen, scale)``: tensors (m ...) of queries, gathered tensors (m n ...) of keys, ``seen`` (m n) bool, to
results (m ...), the first ones with a gradient."""

Like: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], int], tuple[tuple[int, ...], ...]]
"""Shapes of one query's results, of the tensors and n."""


@dataclass(frozen=True)
class _Form:
    """An op's description, and both passes over it."""

    name: str
    asked: tuple[str, ...]
    keys: tuple[str, ...]
    part: Part
    like: Like
    learned: int
    """Results that have a gradient: the first so many."""

    @property
    def n_tensors(self) -> int:
        return len(self.asked) + len(self.keys)

    def schema(self) -> str:
        tensors = ", ".join(f"Tensor {name}" for name in (*self.asked, *self.keys))
        return f"{tensors}, Tensor slots, float scale"

    def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor, float]:
        n, whole = len(self.asked), self.n_tensors
        return inputs[:n], inputs[n:whole], inputs[whole], inputs[whole + 1]

    def results(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Empty results of a call."""
        asked, keys, slots, _ = self.split(inputs)
        dtype = accumulate_dtype(asked[0].dtype)
        shapes = self.like(asked, keys, slots.shape[2])
        return [asked[0].new_empty(*slots.shape[:2], *shape, dtype=dtype) for shape in shapes]

    def parts(self, inputs: Sequence[Any]) -> Iterator[tuple[slice, list[Tensor], list[Tensor], Tensor, Tensor]]:
        """Queries of all rows side by side, some at a time: theirs, the gathered keys, where these lie, which are seen."""
        asked, keys, slots, _ = self.split(inputs)
        (b, t, n), s = slots.shape, keys[0].shape[1]
        row = torch.arange(b, device=slots.device)[:, None, None] * s
        where, seen = (slots.clamp(min=0) + row).flatten(0, 1), (slots >= 0).flatten(0, 1)
        dtype = accumulate_dtype(asked[0].dtype)
        queries, held = [x.flatten(0, 1) for x in asked], [x.flatten(0, 1) for x in keys]
        wide = sum(x[0, 0].numel() if x.numel() else 0 for x in keys) + max(x.shape[2] for x in asked)
        budget = by_device(slots.device, _BUDGET_CPU, _BUDGET_GPU)
        size = max(_LEAST, budget // max(n * wide, 1))
        for start in range(0, b * t if s and n else 0, size):
            part = slice(start, start + size)
            gathered = [x[where[part]].to(dtype) for x in held]
            yield part, [x[part].to(dtype) for x in queries], gathered, where[part], seen[part]

    def forward(self, *inputs: Any) -> list[Tensor]:
        with no_autocast(inputs[0].device):
            out = [x.zero_() for x in self.results(inputs)]
            for part, asked, keys, _, seen in self.parts(inputs):
                for whole, found in zip(out, self.part(asked, keys, seen, inputs[-1]), strict=True):
                    whole.flatten(0, 1)[part] = found
            return out

    def backward(self, *given_to: Any) -> list[Tensor]:
        dys, inputs = given_to[: self.learned], given_to[self.learned :]
        asked, keys, _, scale = self.split(inputs)
        dtype, n = accumulate_dtype(asked[0].dtype), len(asked)
        grads = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (*asked, *keys)]
        flat = [x.flatten(0, 1) for x in grads]
        with no_autocast(dys[0].device):
            for part, queries, gathered, where, seen in self.parts(inputs):
                with autograd_inside():
                    given = [x.detach().requires_grad_() for x in (*queries, *gathered)]
                    out = self.part(given[:n], given[n:], seen, scale)[: self.learned]
                    found = torch.autograd.grad(out, given, [dy.flatten(0, 1)[part].to(dtype) for dy in dys])
                for whole, grad in zip(flat[:n], found[:n], strict=True):
                    whole[part] = grad
                for whole, grad in zip(flat[n:], found[n:], strict=True):
                    whole.index_add_(0, where.flatten(), grad.flatten(0, 1))
        return [grad.to(x.dtype) for grad, x in zip(grads, (*asked, *keys), strict=True)]

    def operators(self) -> tuple[Any, Any]:
        schema, n = self.schema(), self.n_tensors
        dys = ", ".join(f"Tensor dy{i}" for i in range(self.learned))
        forward: Any = torch.library.custom_op(
            f"hybridtf::{self.name}", self.forward, mutates_args=(), schema=f"({schema}) -> Tensor[]"
        )
        forward.register_fake(lambda *inputs: self.results(inputs))
        backward: Any = torch.library.custom_op(
            f"hybridtf::{self.name}_backward", self.backward, mutates_args=(),
            schema=f"({dys}, {schema}) -> Tensor[]",
        )
        backward.register_fake(lambda *inputs: [x.new_empty(x.shape) for x in inputs[self.learned : self.learned + n]])
        count_flops(self.name, self.forward, self.backward)
        return getattr(torch.ops.hybridtf, self.name).default, getattr(torch.ops.hybridtf, f"{self.name}_backward").default


@dataclass(frozen=True)
class GatherOp:
    """What :func:`gather_op` makes."""

    form: _Form
    forward_op: Any
    function: type[torch.autograd.Function]

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """``(*asked, *keys, slots, scale)``: ``asked`` (b t ...), ``keys`` (b s ...), ``slots`` (b t n) int64, -1 for none.
        Results (b t ...) in float32 at least; the first ones have a gradient, of the first order."""
        # Views, since the compiler refuses one tensor in two places.
        given = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        run: Any = self.function.apply if torch.is_grad_enabled() else self.forward_op
        return tuple(run(*given))


def gather_op(
    name: str, part: Part, *, asked: Sequence[str], keys: Sequence[str], like: Like, learned: int = 1
) -> GatherOp:
    """The op ``name`` (of which the operators are ``hybridtf::name`` and ``hybridtf::name_backward``); the first ``learned``
    results have a gradient."""
    form = _Form(name, tuple(asked), tuple(keys), part, like, learned)
    forward, backward = form.operators()
    n, twice = form.n_tensors, first_order(lambda *x: tuple(backward(*x)), name, "torch")

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return tuple(forward(*inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*inputs[: n + 1])
            ctx.scale = inputs[n + 1]
            ctx.mark_non_differentiable(*output[learned:])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            op: Any = twice.apply if torch.is_grad_enabled() else backward
            return (*op(*grads[:learned], *ctx.saved_tensors, ctx.scale), None, None)

    return GatherOp(form, forward, Gathered)
