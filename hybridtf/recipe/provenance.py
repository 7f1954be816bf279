"""Which commit the working folder is at."""

from __future__ import annotations

import functools
import subprocess

_GIT_SECONDS = 10


@functools.cache
def commit() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it), or Nones outside of a checkout.

    Asked once: what runs is what was there when it was loaded.
    """
    found = _git("rev-parse", "HEAD")
    return (None, None) if found is None else (found, bool(_git("status", "--porcelain", "--untracked-files=no")))


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
