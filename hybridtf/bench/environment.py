"""Where a measurement was made: what a reader needs to judge a number, or to repeat it."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any

import torch

import hybridtf
from hybridtf.core import active
from hybridtf.recipe.provenance import commit


def environment() -> dict[str, Any]:
    """``python torch hybridtf`` versions, ``plugins`` (name -> version), ``os cpu cores threads memory`` (bytes of main
    memory), ``gpu`` (name, or None), ``commit`` of the working directory's git checkout (or None) and whether it is
    ``dirty``."""
    revision, dirty = commit()
    return {
        "python": platform.python_version(), "torch": str(torch.__version__), "hybridtf": hybridtf.__version__,
        "plugins": {name: version for name, version in active().plugins.items() if name != "hybridtf"},
        "os": platform.platform(), "cpu": _cpu_model(), "cores": cores(), "threads": torch.get_num_threads(),
        "memory": main_memory(), "gpu": _gpu(), "commit": revision, "dirty": dirty,
    }


def cores() -> int:
    """Cores that this process may use: a container or a job scheduler often gives fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@functools.cache
def main_memory() -> int | None:
    """Bytes of main memory, or of the container's limit where that is less; None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


@functools.cache
def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
