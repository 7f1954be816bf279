"""The README's code runs and its recipe loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridtf.recipe import load_recipe
from hybridtf.train import TrainConfig

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks("python")
    assert found
    for code in found:
        exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.startswith("[[")


def test_the_recipe_loads_and_builds(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "my.toml"
    path.write_text(text)
    recipe = load_recipe(path, sections={"train": TrainConfig})
    assert recipe.model.stacks()[0].pattern == "(m*3 a)*2"
    assert sum(p.numel() for p in recipe.model.build().parameters()) > 1e6
