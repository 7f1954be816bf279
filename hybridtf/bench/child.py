"""One trial of a phase in a fresh process: under a limit of memory and of time, its outcome as a word.

The subject travels as a pickle to a process of this very interpreter and back comes one line of JSON, so whatever the
trial does to its process (fragments, a kill by the system) it does to nobody else.

On a CPU the limit is RLIMIT_DATA, which counts the private writable memory that a process asked for: torch's tensors and
workspaces all are. RLIMIT_AS would also count what libraries only reserve (gigabytes), RLIMIT_RSS is ignored by Linux.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridtf.bench.outcomes import Outcome, speaks_of_memory
from hybridtf.bench.process_memory import free_bytes, peak_resident, private_bytes, reset_peak_resident, resident
from hybridtf.bench.subject import Subject
from hybridtf.core import ConfigError, active
from hybridtf.cost.calls import device_of
from hybridtf.cost.phases import DecodeStep, Phase, Step, TrainStep, make_step

Report = Mapping[str, Any]
"""``outcome``; ``error`` (its text); ``seconds`` of the child; ``peak`` and what it was beyond: see :func:`_measured`."""

_CODE = "from hybridtf.bench.child import main; main()"
_UNREADABLE = "unreadable"
_TAIL = 600
"""Characters of a child's last words that are kept."""


class Trial(Protocol):
    """How a trial is made; :func:`run_trial` is the real one."""

    def __call__(
        self, subject: Subject, phase: Phase, batch_size: int, length: int, limit_bytes: int | None, timeout_s: float
    ) -> Report: ...


def available_bytes(device: torch.device) -> int:
    """What a trial may take where no limit was asked for: the machine's free memory, or all of a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes()


# -- the parent --------------------------------------------------------------------------------------------------------


def run_trial(
    subject: Subject, phase: Phase, batch_size: int, length: int, limit_bytes: int | None, timeout_s: float
) -> Report:
    """Build ``subject`` in a fresh process, run ``phase`` twice there, and say how that ended.

    ``limit_bytes``: what the model and its step may take beyond the bare process; None: no limit. Raises
    :class:`ConfigError` for a subject that cannot travel to another process.
    """
    request = _packed(subject, phase, batch_size, length, limit_bytes)
    path = os.pathsep.join(p for p in sys.path if p)
    started = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        out, err = child.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"outcome": "timed_out", "error": f"no answer within {timeout_s:g} s", "seconds": timeout_s}
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    seconds = time.perf_counter() - started
    return {**_answer(subject, child.returncode, out, err), "seconds": seconds}


def _packed(subject: Subject, phase: Phase, batch_size: int, length: int, limit_bytes: int | None) -> bytes:
    sizes = (phase, batch_size, length, limit_bytes, torch.get_num_threads())
    try:
        return pickle.dumps((sizes, pickle.dumps(subject)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{subject.name}: another process cannot build it ({error}); make it by a function at the top of a module, "
            "or from a recipe"
        ) from error


def _answer(subject: Subject, code: int, out: bytes, err: bytes) -> dict[str, Any]:
    """What a child that ended has said; what its end says where it could say nothing."""
    if code == 0 and out.strip():
        found: dict[str, Any] = json.loads(out)
        if found["outcome"] == _UNREADABLE:
            raise ConfigError(
                f"{subject.name}: another process cannot build it ({found['error']}); its function must be in a module "
                "that can be imported there"
            )
        return found
    words = err.decode(errors="replace").strip()[-_TAIL:]
    if code == -signal.SIGKILL:
        return {"outcome": "out_of_memory", "error": "killed by the system, as it does when memory runs out"}
    if speaks_of_memory(words):
        return {"outcome": "out_of_memory", "error": words}
    how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return {"outcome": "failed", "error": f"the trial {how}: {words or 'it said nothing'}"}


# -- the child ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read a request from the standard input, answer on the standard output; what the model prints goes to errors."""
    answer = os.dup(1)
    os.dup2(2, 1)
    sizes, packed = pickle.loads(sys.stdin.buffer.read())
    try:
        subject = pickle.loads(packed)
    except (AttributeError, ImportError) as error:
        found: dict[str, Any] = {"outcome": _UNREADABLE, "error": str(error)}
    else:
        found = _tried(subject, *sizes)
    with os.fdopen(answer, "w") as file:
        json.dump(found, file)


def _tried(
    subject: Subject, phase: Phase, batch_size: int, length: int, limit_bytes: int | None, threads: int
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    _wake()
    before = resident()
    try:
        with _limited(limit_bytes):
            return _measured(subject, phase, batch_size, length, limit_bytes, before)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _ended("out_of_memory", error)
    except Exception as error:  # whatever a model raises is an outcome of its trial
        return _ended("out_of_memory" if speaks_of_memory(str(error)) else "failed", error)


def _ended(outcome: Outcome, error: BaseException) -> dict[str, Any]:
    return {"outcome": outcome, "error": f"{type(error).__name__}: {str(error)[:_TAIL]}"}


def _wake() -> None:
    """Load the components, and what torch loads at its first work (threads, libraries): none of it is the model's."""
    active()
    x = nn.Parameter(torch.randn(64, 64))
    (x @ x).softmax(-1).sum().backward()
    torch.optim.AdamW([x]).step()


@contextmanager
def _limited(limit_bytes: int | None) -> Iterator[None]:
    """Memory beyond what the process holds now is refused above ``limit_bytes``; lifted again, so that it can report."""
    if limit_bytes is None:
        yield
        return
    held = private_bytes()
    if held is None:
        raise ConfigError("a limit of memory can be enforced on Linux alone")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = held + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed if hard < 0 else min(allowed, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _measured(
    subject: Subject, phase: Phase, batch_size: int, length: int, limit_bytes: int | None, before: int | None
) -> dict[str, Any]:
    """Two runs of the step, as every harness makes them; the peak is that of the second. ``resident`` (CPU): before the
    model was built, and at the peak."""
    model = subject.build()
    device = device_of(model)
    if device.type == "cuda" and limit_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), device)
    finite = _Finite(model)
    step = make_step(phase, subject, model, batch_size, length)
    step.prepare()
    step.run()
    step.prepare()
    if isinstance(step, DecodeStep):
        step.forget_start()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    was_reset = reset_peak_resident()
    step.run()
    found: dict[str, Any] = {"outcome": "fits", "error": None, "resident": {"before": before, "peak": None}}
    if was_reset and before is not None:
        found["resident"]["peak"] = peak = peak_resident()
        found["peak"] = None if peak is None else peak - before
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["peak"] = torch.cuda.max_memory_allocated(device)
    if not (finite.so_far and _finite_weights(step)):
        found |= {"outcome": "non_finite", "error": "scores or trained weights are not finite"}
    return found


class _Finite:
    """Watches the scores of every call of a model, without memory of its own: the least and the greatest tell."""

    def __init__(self, model: nn.Module) -> None:
        self.so_far = True
        model.register_forward_hook(self._look)

    def _look(self, model: nn.Module, args: Any, out: Any) -> None:
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if isinstance(scores, Tensor):
            self.so_far = self.so_far and _is_finite(scores)


def _finite_weights(step: Step) -> bool:
    """A loss that is not finite leaves weights that are not, whichever way the model computed it."""
    return not isinstance(step, TrainStep) or all(_is_finite(p) for p in step.model.parameters() if p.requires_grad)


def _is_finite(x: Tensor) -> bool:
    """No NaN and no infinity among the numbers of ``x``."""
    if not x.numel() or not x.is_floating_point():
        return True
    least, greatest = x.detach().aminmax()
    return math.isfinite(float(least)) and math.isfinite(float(greatest))


