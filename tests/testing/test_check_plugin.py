"""The kit as a product: ``pytest --pyargs hybridtf.testing`` over a plugin, and the smallest case of a broken law."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtf.core import Registries, using
from hybridtf.testing import doubles, run_checks
from hybridtf.testing.smallest import ids_of
from tests.testing.broken import WRONG, BrokenConfig

CLEAN = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_ADDOPTS": "-p no:cacheprovider"}


@pytest.fixture(autouse=True)
def registries() -> Iterator[Registries]:
    registries = doubles.registries()
    registries.kernels.add(WRONG)
    with using(registries):
        yield registries


@pytest.mark.parametrize(
    ("variant", "law", "smallest"),
    [
        ("DropsState", "cut", "batch 1, pieces of [1, 1] tokens"),
        ("SeesFuture", "causal", "token 1 of 9 changes"),
        ("IgnoresSegments", "segment", "document ids ['0'] (0 is a pad)"),
        ("PadsDecay", "segment", "document ids ['10'] (0 is a pad)"),
    ],
)
def test_the_smallest_case_is_found(variant: str, law: str, smallest: str) -> None:
    (result,) = run_checks("mixers", BrokenConfig(variant=variant), [law], shrink=True)
    assert not result.ok
    assert result.smallest == smallest


def test_what_is_kept_has_no_smallest_case() -> None:
    (result,) = run_checks("mixers", BrokenConfig(), ["cut"], shrink=True)
    assert result.ok
    assert result.smallest == ""


def test_rows_of_documents() -> None:
    assert ids_of([([(1, 2), (0, 1)], 1), ([], 0)]).tolist() == [[0, 1, 1, 2, 0], [0, 0, 0, 0, 0]]


@pytest.mark.slow
def test_pytest_runs_the_kit_over_an_installed_plugin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "hybridtf.testing", "-q"]
    result = subprocess.run(
        [*command, "--hybridtf-plugin", "hybridtf-example"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    wrong = subprocess.run(
        [*command, "--hybridtf-plugin", "hybridtf-exampel"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True,
        timeout=600,
    )
    assert wrong.returncode != 0
    assert "Did you mean 'hybridtf-example'?" in wrong.stdout + wrong.stderr
