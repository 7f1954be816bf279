"""Ctrl-C and SIGTERM: the step is finished and saved. A second one ends at once."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from hybridtf.core import HybridTFError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(HybridTFError):
    """Training was stopped by Ctrl-C after ``step`` steps; ``path`` is the checkpoint that was saved."""

    exit_code: ClassVar[int] = 128 + signal.SIGINT
    how: ClassVar[str] = "interrupted"

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        super().__init__(f"{self.how} after step {step}; saved {path}. Resume to continue exactly there")


class Terminated(Interrupted):
    """The same by SIGTERM, as a scheduler sends it before it kills."""

    exit_code: ClassVar[int] = 128 + signal.SIGTERM
    how: ClassVar[str] = "terminated"


class StopSignals:
    """Inside the block, the first SIGINT or SIGTERM sets ``received``; outside the main thread nothing happens."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def error(self, step: int, path: Path) -> Interrupted:
        """What to raise once step ``step`` is saved in ``path``."""
        return (Terminated if self.received == signal.SIGTERM else Interrupted)(step, path)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        elif number == signal.SIGTERM:
            raise SystemExit(Terminated.exit_code)
        else:
            raise KeyboardInterrupt
