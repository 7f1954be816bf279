"""What ops with gradients of their own share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from hybridtf.core.errors import KernelError
from hybridtf.ops.flop_formulas import CountElements


def first_order(gradients: Callable[..., tuple[Tensor, ...]], op: str, kernel: str) -> type[torch.autograd.Function]:
    """``gradients`` as a function of autograd that refuses to be differentiated, by a :class:`KernelError`.

    An op applies it where a graph of its gradients is asked for. ``torch.func.grad`` always asks for that graph, so the
    error may come only when somebody differentiates it.
    """

    class FirstOrder(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return gradients(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            raise KernelError(f"{op}: kernel {kernel!r} has no second derivatives; use kernel 'reference'")

    return FirstOrder


def with_backward(
    forward_op: Any, backward_op: Any, *, op: str, kernel: str, n_tensors: int,
    place: Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]], keep_results: bool = False,
) -> type[torch.autograd.Function]:
    """``forward_op(*tensors, *options)``, which gives a tuple, with ``backward_op`` for its gradients, of the first order.
    Not by ``register_autograd``, which ``torch.func`` cannot pass through.

    Both are overloads (``torch.ops.hybridtf.NAME.default``), which a compiler knows, and not the objects that defined them.
    Of the arguments ``n_tensors`` are tensors or None; ``place(tensors, found)`` says what of them has which gradient.
    ``backward_op(*dresults, *tensors, *options)``; with ``keep_results`` it is given the results as well, before the tensors,
    and only the first has a gradient.
    """
    twice: Any = first_order(backward_op, op, kernel)

    class WithBackward(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return tuple(forward_op(*inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*(output if keep_results else ()), *inputs[:n_tensors])
            ctx.options = inputs[n_tensors:]
            if keep_results:
                ctx.mark_non_differentiable(*output[1:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            run: Any = twice.apply if torch.is_grad_enabled() else backward_op
            found = run(*(grads[:1] if keep_results else grads), *saved, *ctx.options)
            return (*place(saved[len(saved) - n_tensors :], found), *[None] * len(ctx.options))

    WithBackward.__name__ = WithBackward.__qualname__ = f"WithBackward_{op}_{kernel}"
    return WithBackward


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Record gradients inside a custom operator, whose body runs below autograd.

    In a compiled graph it also runs below what reads conjugates and negatives that are only noted on a tensor, as the
    derivatives of complex operations leave them: they would be silently left out.
    """
    keys = torch._C.DispatchKey
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.Conjugate, keys.Negative, keys.ZeroTensor):
        hidden = hidden - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden), torch.enable_grad():
        yield


def count_flops(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], *, elementwise: bool = False
) -> None:
    """Tell torch's counter of operations what happens inside, by doing it on tensors without data; ``elementwise``: with the
    sums, products and exponentials of an op that has no other work."""
    for operator, run in ((name, forward), (f"{name}_backward", backward)):
        register_flop_formula(getattr(torch.ops.hybridtf, operator), get_raw=True)(_counted(run, elementwise))


def _counted(run: Callable[..., Any], elementwise: bool) -> Callable[..., int]:
    known: dict[Any, int] = {}  # layers that are alike, and steps of one length, are counted once

    def count(*inputs: Any, out_val: Any = None, **more: Any) -> int:
        key = _key(inputs)
        if key not in known:
            given = [_shape_only(x) for x in inputs]
            if elementwise:
                with CountElements() as elements:
                    run(*given)
                known[key] = elements.flops
            else:
                with FlopCounterMode(display=False) as counter:
                    run(*given)
                known[key] = int(counter.get_total_flops())
        return known[key]

    return count


def _key(x: Any) -> Any:
    """All that :func:`_shape_only` leaves of ``x``, to be looked up by."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return tuple(_key(item) for item in x) if isinstance(x, list | tuple) else (type(x), x)


def _shape_only(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return [_shape_only(item) for item in x] if isinstance(x, list | tuple) else x
