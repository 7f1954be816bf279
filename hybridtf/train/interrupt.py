"""Ctrl-C: the step is finished and saved. A second one ends at once."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from hybridtf.core import HybridTFError


class Interrupted(HybridTFError):
    """Training was stopped by Ctrl-C after ``step`` steps; ``path`` is the checkpoint that was saved."""

    exit_code: ClassVar[int] = 130

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        super().__init__(f"interrupted after step {step}; saved {path}. Resume to continue exactly there")


class CtrlC:
    """Inside the block, the first SIGINT sets ``pressed``; outside the main thread nothing happens."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None
        self._active = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
