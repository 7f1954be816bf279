"""Writing files whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridtf.core.errors import CheckpointError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it when the block ends well; else nothing changes.

    Raises :class:`CheckpointError` where the disk refuses (full, read only), with the old file intact.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        _sync(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None and temporary.exists():
            temporary.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that replaces the folder ``path`` when the block ends well; else nothing changes.

    Raises :class:`CheckpointError` as :func:`atomic_file` does.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        os.chmod(temporary, 0o755)
        if path.exists():
            # Two renames: a kill between them leaves the old folder complete under a name that a loader can find.
            old = path.with_name(f".{path.name}.old")
            if old.exists():
                shutil.rmtree(old)
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _refused(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: could not be written ({error.strerror or error}); what was there is unchanged")


def _sync(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
