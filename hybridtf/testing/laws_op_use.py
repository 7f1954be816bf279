"""Laws of a kernel as it is called: in every phase and dtype that it does not refuse, on any memory, which it leaves as it was.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core import DTYPES, PHASES, KernelRequest, OpCase, OpInputs, Phase, Segments
from hybridtf.testing.compare import finite
from hybridtf.testing.errors import ContractError
from hybridtf.testing.laws_op import EXACT, check_agreement, check_over_time
from hybridtf.testing.op_calls import (
    LAYOUTS,
    Op,
    at_real,
    call,
    cast,
    documents,
    draw,
    named_inputs,
    named_results,
    same_results,
)

LOW = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""How far (relative, by norm) results and gradients in a low precision may be from the reference in float32."""

WhyNot = Callable[[KernelRequest], str | None]


def check_op(case: OpCase, op: Op, reference: Op, why_not: WhyNot) -> None:
    """Everything that a kernel owes for one case; raises :class:`ContractError` with the first difference.

    ``why_not`` says which phases and dtypes it is held to: what is refused there is not tried, and what is not must run.
    """
    def takes(phase: Phase, dtype: torch.dtype) -> bool:
        request = KernelRequest(case.op, phase, dtype, torch.device("cpu"), case.sizes, case.features)
        return why_not(request) is None

    for dtype in DTYPES:
        for phase in PHASES:
            if takes(phase, dtype):
                check_runs(case, op, phase, dtype)
    exact = [(dtype, tol) for dtype, tol in EXACT if takes("train", dtype)]
    for dtype, tol in exact if op is not reference else ():  # which agrees with itself
        check_agreement(case, op, reference, dtype, tol)
    for dtype, tol in exact[:1]:
        check_over_time(case, op, reference, dtype, tol)
        check_memory(case, op, dtype, tol)
    for dtype, tol in EXACT:
        if takes("prefill", dtype):
            check_prefill(case, op, reference, dtype, tol)
        if takes("decode", dtype):
            check_decode(case, op, reference, dtype, tol)
    for dtype in LOW:
        if takes("train", dtype):
            check_low_precision(case, op, reference, dtype)


def check_runs(case: OpCase, op: Op, phase: Phase, dtype: torch.dtype) -> None:
    """It runs where it said that it can: what it cannot is for ``why_not`` to say, and not for an exception."""
    x = draw(case, 2, 1 if phase == "decode" else case.chunk + 1, 6, dtype)
    with torch.set_grad_enabled(phase == "train"):
        try:
            y, state = call(case, op, x if phase == "train" else cast(x, Tensor.detach))
            if phase == "train":
                torch.stack([z.float().sum() for _, z in named_results(y, state)]).sum().backward()
        except Exception as error:  # whatever other people's code raises
            name = str(dtype).removeprefix("torch.")
            raise ContractError(
                f"{case.op} ({case.name}) fails for {phase} in {name}, which why_not did not refuse: it must refuse in "
                f"why_not, not fail ({type(error).__name__}: {error})"
            ) from error


def check_prefill(case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float) -> None:
    """Without gradients it gives what the reference gives, and writes nothing into what it was given."""
    for rows in (None, LAYOUTS[2]):
        segments = None if rows is None else documents(rows)
        x = cast(draw(case, 3, 10, 7, dtype), Tensor.detach)
        before = cast(x, Tensor.clone)
        what = f"{case.op} ({case.name}) prefill in {dtype}, documents {rows}"
        with torch.no_grad():
            (y, state), want = call(case, op, x, segments), call(case, reference, before, segments)
        same_results((at_real(case, y, segments), state), (at_real(case, want[0], segments), want[1]), tol, what)
        _unwritten(case, x, before, "prefill")


def check_decode(case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float) -> None:
    """One token after the other from a state, without gradients: a document that goes on, one that begins, and a pad."""
    x = cast(draw(case, 3, 4, 8, dtype), Tensor.detach)
    if x.state is None:
        return  # without a state a token is a call of length 1, which the other laws try
    for ids, goes_on in ((None, None), ([1, 1, 0], [True, False, True])):
        segments = None if ids is None else Segments.from_ids(torch.tensor(ids)[:, None], continues=torch.tensor(goes_on))
        ours = theirs = x.state
        for i in range(4):
            timed = pytree.tree_map(lambda z, i=i: z[:, i : i + 1], dict(x.timed))
            given, kept = OpInputs(timed, x.fixed, ours), cast(OpInputs(timed, x.fixed, ours), Tensor.clone)
            with torch.no_grad():
                y, new = call(case, op, given, segments)
                want, theirs = call(case, reference, OpInputs(timed, x.fixed, theirs), segments)
            what = f"{case.op} ({case.name}) decode in {dtype}, token {i} (documents {ids})"
            same_results((at_real(case, y, segments), new), (at_real(case, want, segments), theirs), tol, what)
            _unwritten(case, given, kept, "decode")
            ours = new


def _unwritten(case: OpCase, x: OpInputs, before: OpInputs, phase: str) -> None:
    for (name, a), (_, b) in zip(named_inputs(x), named_inputs(before), strict=True):
        if not torch.equal(a, b):
            raise ContractError(f"{case.op} ({case.name}): {phase} writes into {name}, which is its caller's")


def check_memory(case: OpCase, op: Op, dtype: torch.dtype, tol: float) -> None:
    """Inputs may lie anywhere in memory, and training writes into none of them."""
    for rows in (None, LAYOUTS[2]):
        segments = None if rows is None else documents(rows)
        x = draw(case, 3, 10, 9, dtype)
        before = cast(x, lambda z: z.detach().clone())
        y, state = call(case, op, x, segments)
        _unwritten(case, x, before, "train")
        spread = cast(x, _strided)
        strided = call(case, op, spread, segments)
        what = f"{case.op} ({case.name}) on inputs that are not contiguous (documents {rows})"
        same_results((at_real(case, strided[0], segments), strided[1]), (at_real(case, y, segments), state), tol, what)


def _strided(x: Tensor) -> Tensor:
    """The same numbers with others between them, the first two axes swapped in memory."""
    wide = torch.stack([x.detach(), torch.full_like(x, torch.nan)], -1)
    wide = wide.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else wide.contiguous()
    return wide[..., 0].requires_grad_()


def check_low_precision(case: OpCase, op: Op, reference: Op, dtype: torch.dtype) -> None:
    """In a low precision it is near the reference in float32 on the same numbers, and gives the reference's dtypes."""
    x = draw(case, 2, 2 * case.chunk + 3, 10, dtype)
    wide = cast(x, lambda z: z.detach().float().requires_grad_())
    promised_y, promised_state = call(case, reference, x)
    dtypes = [z.dtype for _, z in named_results(promised_y, promised_state)]
    if x.state is not None:  # comes in the dtypes in which the op hands it on
        x = x._replace(state=pytree.tree_map(
            lambda z, like: z.detach().to(like.dtype).requires_grad_() if z.is_floating_point() else z, x.state, promised_state
        ))
    ours, theirs = named_results(*call(case, op, x)), named_results(*call(case, reference, wide))
    what = f"{case.op} ({case.name}) in {dtype}"
    for (name, a), (_, b), promised in zip(ours, theirs, dtypes, strict=True):
        if a.dtype != promised:
            raise ContractError(f"{what}: {name} is {a.dtype}, the reference gives {promised}")
        _near(a, b, LOW[dtype], f"{what}: {name}")
    total = [torch.stack([(z.float() * z.detach().float().sign()).sum() for _, z in found]).sum() for found in (ours, theirs)]
    grads = [
        torch.autograd.grad(loss, [z for _, z in named_inputs(given)], allow_unused=True, materialize_grads=True)
        for loss, given in zip(total, (x, wide), strict=True)
    ]
    for (name, _), a, b in zip(named_inputs(x), *grads, strict=True):
        _near(a, b, 2 * LOW[dtype], f"{what}: gradient of {name}")


def _near(got: Tensor, want: Tensor, tol: float, what: str) -> None:
    finite(got, what)
    error = float((got.detach().float() - want.detach()).norm() / want.detach().norm().clamp(min=1e-6))
    if not error <= tol:
        raise ContractError(f"{what}: relative error {error:.1e} (allowed {tol:.0e})")
