"""Kernels against the reference, low precision against float32, one rank of a mesh against none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hybridtf.core import HybridTFError, KernelError, OpKernel, Segments
from hybridtf.testing.compare import close, finite, gradients
from hybridtf.testing.errors import ContractError, NotApplicableError
from hybridtf.testing.laws_time import total_loss, weight_like
from hybridtf.testing.subject import Subject, by_phase

REFERENCE = "reference"
IDS = ("0111110222220", "1111111111111")


def op_kernels(module: nn.Module) -> list[OpKernel]:
    """The ops of a component."""
    return [part for part in module.modules() if isinstance(part, OpKernel)]


def pin(module: nn.Module, op: str, kernel: str) -> nn.Module:
    """Make every use of an op in a built component run this kernel; raises :class:`KernelError` where it cannot."""
    for part in op_kernels(module):
        if part.op == op:
            part.kernel = kernel
            part.fill()
    return module


def check_kernels(subject: Subject) -> None:
    """Every kernel of every op that can run here agrees with the op's reference: outputs, states, gradients."""
    bound = op_kernels(subject.build())
    if not bound:
        raise NotApplicableError("uses no op")
    for op in sorted({part.op for part in bound}):
        kernels = bound[0].kernels
        names = [kernel.name for kernel in kernels.of(op)]
        if REFERENCE not in names:
            raise ContractError(f"op {op!r} has no kernel named 'reference' to be judged by; it has {names}")
        for name in ["auto", *(n for n in names if n != REFERENCE)]:
            for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
                if _agrees(subject, op, name, dtype, tol):
                    break


def _agrees(subject: Subject, op: str, name: str, dtype: torch.dtype, tol: float) -> bool:
    """Compare in one dtype; False where the kernel refuses it."""
    try:
        module = pin(subject.build(dtype), op, name)
    except KernelError:
        return False
    used = [part.chosen.get(("train", dtype)) for part in op_kernels(module) if part.op == op]
    if None in used:
        return False
    judge = subject.build(dtype)
    for other in sorted({part.op for part in op_kernels(judge)}):
        pin(judge, other, REFERENCE)
    what = f"op {op!r}: kernel {name!r} and the reference differ in {dtype}"
    for ids in (None, IDS):
        segments = None if ids is None else Segments.from_ids(torch.tensor([[int(c) for c in row] for row in ids]))
        results = [_run(subject, one, dtype, segments) for one in (module, judge)]
        for (label, a), (_, b) in zip(*results, strict=True):
            close(a, b, tol=tol, what=f"{what}: {label}{'' if ids is None else ' (packed)'}")
    return True


def _run(
    subject: Subject, module: nn.Module, dtype: torch.dtype, segments: Segments | None
) -> list[tuple[str, Tensor]]:
    inputs = subject.inputs(module, 2, 13, dtype=dtype).watched()
    out = subject.call(module, inputs, segments=segments, state=subject.init_state(module, 2))
    weight = weight_like(out.y)
    if segments is not None:
        pad = ~segments.real.view(*segments.ids.shape, *[1] * (weight.ndim - 2))
        weight = weight.masked_fill(pad, 0.0)
    params = dict(module.named_parameters())
    tensors = [*inputs.watching(), *params.values()]
    found = gradients(total_loss(out, weight, with_state=not subject.needs_context(module)), tensors)
    labels = [f"gradient of input {i}" for i in range(len(inputs.watching()))] + [f"gradient of {n}" for n in params]
    real = slice(None) if segments is None else segments.real
    results = [("output", out.y[real].detach()), *zip(labels, found, strict=True)]
    with torch.no_grad():
        state = subject.init_state(module, 2, 20)
        prefill = subject.call(module, inputs, segments=segments, state=state)
        results.append(("prefill", prefill.y[real]))
        step = subject.call(module, inputs.later().columns(slice(0, 1)), state=prefill.state)
        results.append(("decode", step.y))
    return results


LONG = 300
"""Tokens after which exp(1 + 1 + ...) is no float32 any more, three times over."""


def check_finite(subject: Subject) -> None:
    """Tokens of zeros, and a long call, have finite results and gradients in float32."""
    over_time = subject.kind in ("mixers", "channel_mixers", "blocks")
    module = subject.build(torch.float32, **({"max_seq_len": LONG} if over_time else {}))
    given = {}
    if not subject.takes_ids:
        some = subject.inputs(module, 2, 5, dtype=torch.float32)
        given["tokens of zeros"] = replace(some, x=torch.zeros_like(some.x))
    if over_time:
        given[f"a long call ({LONG} tokens)"] = subject.inputs(module, 1, LONG, dtype=torch.float32)
    if not given:
        raise NotApplicableError("takes ids, and is no longer than its parts")
    for what, inputs in given.items():
        watched = inputs.watched()
        out = subject.call(module, watched)
        finite(out.y, f"{what}: the result")
        params = dict(module.named_parameters())
        found = gradients(total_loss(out, weight_like(out.y), with_state=False), [*watched.watching(), *params.values()])
        names = [*(f"input {i}" for i in range(len(watched.watching()))), *params]
        for name, grad in zip(names, found, strict=True):
            finite(grad, f"{what}: gradient of {name}")


def _relative(got: Tensor, want: Tensor) -> float:
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-12))


def _near(got: Tensor, want: Tensor, what: str, tol: float = 3e-2) -> None:
    error = _relative(got, want)
    if not error <= tol:
        raise ContractError(f"{what}: relative error {error:.1e} (allowed {tol:.0e})")


def check_bf16(subject: Subject) -> None:
    """bfloat16, and float32 under autocast, stay close to float32: training, prefill and decode.

    Parameters and inputs are such that bfloat16 holds them exactly, so that a choice (of experts, of blocks) between near
    scores is the same in both: what differs is the arithmetic.
    """
    low = subject.build(torch.bfloat16)
    wide = subject.build(torch.float32)
    wide.load_state_dict(low.state_dict())
    inputs = subject.inputs(wide, 2, 11, dtype=torch.bfloat16).to(torch.float32)
    want = by_phase(subject, wide, inputs)
    for (what, a), (_, b) in zip(by_phase(subject, low, inputs.to(torch.bfloat16)), want, strict=True):
        if a.dtype != torch.bfloat16:
            raise ContractError(f"{what} of a bfloat16 component is {a.dtype}")
        _near(a, b, f"{what} in bfloat16 is far from float32")
    cast = subject.build(torch.float32, compute_dtype=torch.bfloat16)
    cast.load_state_dict(low.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = by_phase(subject, cast, inputs)
    for (what, a), (_, b) in zip(got, want, strict=True):
        _near(a, b, f"{what} under autocast is far from float32")


@contextmanager
def _one_rank() -> Iterator[None]:
    if not dist.is_available():
        raise NotApplicableError("torch.distributed is not available")
    if dist.is_initialized():
        raise NotApplicableError("a process group is already running")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_mesh(subject: Subject) -> None:
    """On a mesh of one rank it gives what it gives without a mesh, or it refuses the mesh with a clear error."""
    plain = subject.build()
    inputs = subject.inputs(plain, 2, 5)
    want = subject.call(plain, inputs).y
    with _one_rank():
        try:
            module = subject.build(mesh=init_device_mesh("cpu", (1,)))
        except HybridTFError as error:
            raise NotApplicableError(f"refuses a mesh: {error}") from error
        close(subject.call(module, inputs).y, want, tol=1e-9, what="on a mesh of one rank")
