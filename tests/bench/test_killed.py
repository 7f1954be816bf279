"""A comparison that is killed at any moment: the next call goes on, no run is lost or done twice, every value is the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hybridtf.bench import CompareOptions, LocalPool, compare, read_records
from tests.bench.bench_cases import RECALL, TRAIN, recipe

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path
from tests.bench.test_killed import run
if __name__ == "__main__":
    run(Path(sys.argv[1]), 2)
    print("finished", flush=True)
"""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(out: Path, workers: int) -> None:
    options = CompareOptions(
        workers=workers, progress="none", speed_phases=(), memory_phases=(), learning_rates=(1e-3, 1e-2), eval_tokens=200,
    )
    train = {**TRAIN, "seq_len": 16, "steps": 40, "save_every": 5}
    recipes = {name: recipe(name, task=RECALL, train=train) for name in ("a", "m")}
    compare(recipes, out, seeds=(0, 1), options=options, say=_say)


def start(script: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(script), str(out)], stdout=subprocess.PIPE, env=environment)


def measured(out: Path) -> dict[tuple[object, ...], object]:
    """What was measured, without times; nothing twice."""
    records = read_records(out / "records.jsonl", skip_corrupt=True)
    keys = [(r["kind"], r["recipe"], r["recipe_hash"], r["seed"]) for r in records]
    assert max(Counter(keys).values()) == 1
    names = ("value", "interval", "units", "curve", "steps", "tokens", "failed", "chosen_lr", "note", "params", "flops")
    return {key: [r.get(name) for name in names] for key, r in zip(keys, records, strict=True)}


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(LocalPool(2).threads)
    run(tmp_path / "whole", 1)
    torch.set_num_threads(threads)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    generator = random.Random(0)
    for lines in (1, 4, 9):
        with start(script, tmp_path / "cut") as running:
            assert running.stdout is not None
            for _ in range(lines):  # until it does something, then at any moment of it
                running.stdout.readline()
            time.sleep(generator.uniform(0, 0.4))
            running.kill()
    with start(script, tmp_path / "cut") as last:
        assert last.stdout is not None
        assert last.stdout.read().endswith(b"finished\n")
    whole, cut = measured(tmp_path / "whole"), measured(tmp_path / "cut")
    assert cut == whole
    assert Counter(key[0] for key in whole) == {"sweep": 8, "train": 4, "model": 4, "quality": 4}
