"""Engines of one machine: cells one after the other in this process, or several at once in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hybridtf.bench.cells import Cell, Failure, Work, failure_of
from hybridtf.bench.environment import cores
from hybridtf.core import ConfigError, HybridTFError
from hybridtf.train import Interrupted

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads or a GPU hangs
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRACE = 20.0
"""Seconds that a worker has to finish its step and save it when all is stopped."""
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")

Message: TypeAlias = tuple[str, Any]
"""``ready``; ``item`` and what the work yielded; ``end`` and a :class:`Failure` or None; or ``raise`` and an error."""


class ThisProcess:
    """One cell after the other, here. A crash of the process is a crash of the comparison; time is not limited."""

    def run(self, cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Any]]:
        """See :class:`~hybridtf.bench.cells.Engine`."""
        for cell in cells:
            for kind, value in _messages(work, cell):
                if kind == "raise":
                    raise value
                if value is not None:
                    yield cell, value


class LocalPool:
    """``workers`` processes with an equal share of the cores each (``threads``, unless given), one cell at a time.

    A worker that dies fails its cell alone, and another one takes its place. ``timeout_s``: a cell that takes longer is
    ended and has ``timed_out``. Workers end with this process, however it ends. Like everything that spawns, a script that
    uses this needs ``if __name__ == "__main__"``. Raises :class:`ConfigError` for work that cannot be sent to a process.
    """

    def __init__(self, workers: int, *, timeout_s: float | None = None, threads: int | None = None) -> None:
        if workers < 1 or (timeout_s is not None and timeout_s <= 0):
            raise ConfigError(f"a pool needs at least one worker and a time above 0, got {workers} and {timeout_s}")
        self.workers, self.timeout_s = workers, timeout_s
        self.threads = threads or max(cores() // workers, 1)

    def run(self, cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Any]]:
        """See :class:`~hybridtf.bench.cells.Engine`."""
        try:
            sent = pickle.dumps(work)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"workers: this work cannot be sent to another process ({error}); functions that build models must be at the "
                "top of a module, or use one worker"
            ) from None
        left, busy = deque(cells), list[_Worker]()
        try:
            busy = [_Worker(sent, self.threads, self.timeout_s) for _ in range(min(self.workers, len(left)))]
            for worker in busy:
                worker.begin(left.popleft())
            while busy:
                for worker in _ready(busy):
                    kind, value = worker.receive()
                    if kind == "raise":
                        raise value
                    if value is not None:
                        yield worker.cell, value
                    if kind != "end":
                        continue
                    if not left:
                        worker.dismiss()
                        busy.remove(worker)
                    elif worker.alive:
                        worker.begin(left.popleft())
                    else:
                        busy[busy.index(worker)] = fresh = _Worker(sent, self.threads, self.timeout_s)
                        fresh.begin(left.popleft())
        finally:
            _stop(busy)


class _Worker:
    """The parent's side of one process."""

    cell: Cell

    def __init__(self, work: bytes, threads: int, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, work, threads), daemon=True)
        with _environment(threads):
            self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def begin(self, cell: Cell) -> None:
        """Give it a cell; the clock of the time limit begins when it is ready to work."""
        self.cell, self.kills, self.alive = cell, _oom_kills(), True
        self.deadline: float | None = None
        with contextlib.suppress(OSError):  # a process that died before is found at the next receive
            self.pipe.send(cell)

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def receive(self) -> Message:
        """What has come; a process that is gone or late ends its cell."""
        try:
            if not self.late or self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "ready":
                    self.deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
                return kind, value
            failure = Failure("timed_out", f"timed out: longer than {self.timeout_s:g} s")
            self.process.kill()
            self.process.join()
        except (EOFError, OSError):
            self.process.join()
            failure = self._death()
        self.alive = False
        return "end", failure

    def _death(self) -> Failure:
        code = self.process.exitcode
        if code == -signal.SIGKILL and _oom_kills() > self.kills:
            return Failure("out_of_memory", "out of memory: the system ended the process")
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        return Failure("crashed", f"the process {how}")

    def dismiss(self) -> None:
        """No more cells."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
        self.pipe.close()


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """The workers that have something to say, or are late; waits for one."""
    times = [worker.deadline for worker in workers if worker.deadline is not None]
    rest = max(min(times) - time.monotonic(), 0.0) if times else None
    spoken = wait([worker.pipe for worker in workers], rest)
    return [worker for worker in workers if worker.pipe in spoken or worker.late]


def _stop(workers: Sequence[_Worker]) -> None:
    """End what is still at work: a training finishes its step and saves it."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + _GRACE
    for worker in workers:
        worker.process.join(max(until - time.monotonic(), 0.0))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()


# -- inside the process ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, work: bytes, threads: int) -> None:
    """Take cells until there are none."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole group; the parent decides, and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    torch.set_num_threads(threads)
    do: Work = pickle.loads(work)
    while (cell := pipe.recv()) is not None:
        pipe.send(("ready", None))
        for kind, value in _messages(do, cell):
            if isinstance(value, Interrupted):
                return
            pipe.send((kind, value))


def _messages(work: Work, cell: Cell) -> Iterator[Message]:
    """What the work yields, then how it ended."""
    try:
        for item in work(cell):
            yield "item", item
    except GeneratorExit:
        raise
    except BaseException as error:
        failure = failure_of(error)
        if failure is None:
            if not isinstance(error, HybridTFError):
                raise
            yield "raise", _sendable(error)
            return
        if failure.result == "crashed":
            traceback.print_exc()  # a fault of ours or of a foreign model's, which a line does not explain
        yield "end", failure
        return
    yield "end", None


def _sendable(error: HybridTFError) -> HybridTFError:
    """The error itself where it survives a pipe, else its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its constructor makes of its own arguments
        return error if isinstance(error, Interrupted) else ConfigError(str(error))
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What a process that is started inside finds in its environment: libraries read it as they are loaded."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _oom_kills() -> int:
    """How many processes of this container the system has ended for want of memory; 0 where it does not say."""
    try:
        lines = _MEMORY_EVENTS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
