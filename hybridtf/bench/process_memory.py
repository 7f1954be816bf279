"""What the operating system says of a process's memory (Linux); None elsewhere, and never a guess."""

from __future__ import annotations

from pathlib import Path

from hybridtf.core import ConfigError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_MAX, _CGROUP_NOW = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def resident() -> int | None:
    """Bytes of the process that are in main memory now."""
    return _field(_STATUS, "VmRSS")


def peak_resident() -> int | None:
    """The most bytes that were in main memory since :func:`reset_peak_resident`, or since the process began."""
    return _field(_STATUS, "VmHWM")


def private_bytes() -> int | None:
    """Bytes of private writable memory that the process has asked for, used or not: what RLIMIT_DATA counts."""
    return _field(_STATUS, "VmData")


def reset_peak_resident() -> bool:
    """Begin a new peak at what is resident now (Linux 4.0); False where the system does not allow it."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def free_bytes() -> int:
    """Memory that can be had now without swapping, within the container's limit. Raises :class:`ConfigError` where the
    system does not say."""
    free = _field(_MEMINFO, "MemAvailable")
    if free is None:
        raise ConfigError("this system does not say how much memory is free; give a limit")
    try:
        limit, now = (path.read_text(encoding="ascii").strip() for path in (_CGROUP_MAX, _CGROUP_NOW))
    except OSError:
        return free
    return min(free, int(limit) - int(now)) if limit.isdigit() and now.isdigit() else free


def _field(path: Path, name: str) -> int | None:
    """A field of a file of /proc, in bytes; the kernel writes it in units of 1024."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024
