"""A run and a comparison, made once: no test changes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.helpers import MAMBA, ok, write_recipe


@pytest.fixture(scope="session", autouse=True)
def _no_columns() -> Iterator[None]:
    """A test runner's workers may set COLUMNS, which the program obeys."""
    with pytest.MonkeyPatch.context() as patch:
        if "COLUMNS" in os.environ:
            patch.delenv("COLUMNS")
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe's file."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    folder = tmp_path_factory.mktemp("trained")
    ok("train", write_recipe(folder), "-o", folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """The arguments of a comparison that was made, and its folder."""
    folder = tmp_path_factory.mktemp("compared")
    other = write_recipe(folder, "attention", ("(m a)*", "a*"), (MAMBA, ""))
    arguments = ["compare", write_recipe(folder), other, "-o", folder / "out", "--context", 32, "--repeats", 1]
    result = ok(*arguments)
    assert "everything was in" not in result.stderr
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    return arguments, folder
