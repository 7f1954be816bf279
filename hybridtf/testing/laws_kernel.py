"""What a kernel record promises, whatever its op."""

from __future__ import annotations

import itertools
import pickle

import torch

from hybridtf.core import DTYPES, PHASES, ConfigError, Kernel, KernelError, KernelRequest, KernelSet, active
from hybridtf.testing.errors import ContractError, NotApplicableError
from hybridtf.testing.laws_numeric import REFERENCE, _agrees, op_kernels
from hybridtf.testing.laws_op import EXACT
from hybridtf.testing.laws_op_use import check_op
from hybridtf.testing.smallest import can_shrink, smallest_of
from hybridtf.testing.subject import Subject


def check_kernel(kernel: Kernel, kernels: KernelSet | None = None) -> None:
    """A reason or None for any request, a function from ``load``, a reference beside it, agreement with it.

    Agreement is tried on every registered case of the op (as a function, with the laws of time and documents), and through
    every registered mixer and channel mixer that uses the op. ``kernels``: all that are registered, unless given. Raises
    :class:`ContractError`.
    """
    known = active().kernels if kernels is None else kernels
    if REFERENCE not in [k.name for k in known.of(kernel.op)]:
        raise ContractError(f"op {kernel.op!r} has no kernel named 'reference' to be judged by")
    if kernel.name == "auto":
        raise ContractError("'auto' cannot be the name of a kernel: it asks for the best one")
    runs = _answers(kernel)
    try:
        pickle.dumps(kernel)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ContractError(f"the record cannot be pickled: {error}; use functions of a module's top level") from error
    if not runs:
        raise NotApplicableError("cannot run on a CPU")
    if not callable(kernel.load()):
        raise ContractError("load() must return the function")
    _over_cases(kernel, known)
    if kernel.name != REFERENCE:
        _through_mixers(kernel)


def _answers(kernel: Kernel) -> bool:
    """Ask for everything; whether it can run anything on a CPU."""
    runs = False
    devices = (torch.device("cpu"), torch.device("cuda"), torch.device("mps"))
    for phase, dtype, device in itertools.product(PHASES, DTYPES, devices):
        reason = kernel.why_not(KernelRequest(kernel.op, phase, dtype, device))
        if not (reason is None or (isinstance(reason, str) and reason.strip())):
            raise ContractError(f"why_not must answer a reason or None, got {reason!r} for {phase}, {dtype}, {device}")
        runs |= reason is None and device.type == "cpu"
    return runs


def _over_cases(kernel: Kernel, known: KernelSet) -> None:
    reference = known.get(kernel.op, REFERENCE).load()
    for case in active().op_cases.get(kernel.op, ()):
        check_op(case, kernel.load(), reference, kernel.why_not)


def smallest_call(kernel: Kernel, faults: tuple[type[Exception], ...], kernels: KernelSet | None = None) -> str:
    """A few words on the smallest call in which a broken kernel differs from its reference; empty where none was found."""
    known = active().kernels if kernels is None else kernels
    if not can_shrink() or REFERENCE not in [k.name for k in known.of(kernel.op)]:
        return ""
    reference = known.get(kernel.op, REFERENCE).load()
    for case in active().op_cases.get(kernel.op, ()):
        for dtype, tol in EXACT:
            request = KernelRequest(kernel.op, "train", dtype, torch.device("cpu"), case.sizes, case.features)
            if kernel.why_not(request) is None and (words := smallest_of(case, kernel.load(), reference, dtype, tol, faults)):
                return words
    return ""


def _through_mixers(kernel: Kernel) -> None:
    for kind in ("mixers", "channel_mixers"):
        for config_cls in active()[kind].configs().values():
            subject = Subject(kind, config_cls.tiny())
            try:
                uses = any(part.op == kernel.op for part in op_kernels(subject.build()))
            except (ConfigError, KernelError):
                continue
            for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 2e-4)) if uses else ():
                if _agrees(subject, kernel.op, kernel.name, dtype, tol):
                    break
