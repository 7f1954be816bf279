"""Pools: a cell that fails is one of four results, and the others go on."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtf.bench import Failure, LocalPool
from hybridtf.bench.cells import failure_of
from hybridtf.bench.pool import ThisProcess
from hybridtf.core import ConfigError
from tests.bench.pool_work import act, cells

ROOT = Path(__file__).parents[2]


def found(engine, *names):
    out = {name: [] for name in names}
    for cell, item in engine.run(cells(*names), act):
        out[cell.recipe].append(item)
    return out


def test_in_this_process_the_others_go_on(capfd):
    got = found(ThisProcess(), "diverges", "memory", "bug", "well")
    assert [got[name][-1].result for name in ("diverges", "memory", "bug")] == ["non_finite", "out_of_memory", "crashed"]
    assert got["diverges"][-1].reason == "NonFiniteError: step 3: the loss is not finite"
    assert got["bug"][0] == "bug begins"  # what was known before is kept
    assert got["well"][-1]["pid"] == os.getpid()
    assert "no such thing" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="a mistake"):
        found(ThisProcess(), "well", "mistake")


def test_a_process_that_dies_fails_its_cell_alone_and_a_mistake_ends_all():
    got = {"killed": [], "well": []}
    running = LocalPool(1, threads=1).run(cells("killed", "well", "faults"), act)
    for cell, item in itertools.islice(running, 5):
        got.setdefault(cell.recipe, []).append(item)
    with pytest.raises(ConfigError, match=r"file.toml: model: is wrong"):
        next(running)
    assert got["killed"] == ["killed begins", Failure("crashed", "the process was ended by SIGKILL")]
    assert got["well"][-1]["threads"] == 1
    assert got["well"][-1]["omp"] == "1"
    assert got["well"][-1]["pid"] != os.getpid()


@pytest.mark.slow
def test_processes_that_die_or_are_late_fail_their_cell_alone():
    names = ("killed", "well", "slow", "diverges", "also well")
    got = found(LocalPool(2, timeout_s=3.0, threads=1), *names)
    results = {name: items[-1].result for name, items in got.items() if isinstance(items[-1], Failure)}
    assert results == {"killed": "crashed", "slow": "timed_out", "diverges": "non_finite"}
    assert got["killed"] == ["killed begins", Failure("crashed", "the process was ended by SIGKILL")]
    assert got["slow"][-1].reason == "timed out: longer than 3 s"
    assert all(len(got[name]) == 2 for name in ("well", "also well"))


def test_work_that_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match=r"at the top of a module, or use one worker"):
        list(LocalPool(2).run(cells("a"), lambda cell: iter(())))
    with pytest.raises(ConfigError, match="at least one worker"):
        LocalPool(0)


def test_what_the_errors_mean():
    assert failure_of(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")).result == "out_of_memory"
    assert failure_of(RuntimeError("shapes do not match")).result == "crashed"
    assert failure_of(MemoryError()).reason == "out of memory: MemoryError"
    assert failure_of(KeyboardInterrupt()) is None


SCRIPT = """
from pathlib import Path
from hybridtf.bench import LocalPool
from tests.bench.pool_work import cells, rest
if __name__ == "__main__":
    for _ in LocalPool(1, threads=1).run(cells(FILE), rest):
        print("on", flush=True)
"""


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FILE", repr(str(tmp_path / "pid"))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"on\n"
        worker = int((tmp_path / "pid").read_text())
        parent.kill()
    until = time.monotonic() + 20
    while _lives(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(worker)


def _lives(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
