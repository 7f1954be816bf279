"""``new-plugin``: what it writes is the example's twin, works at once under any name, and is whole or not there."""

from __future__ import annotations

import json
import keyword
import os
import subprocess
import sys
from pathlib import Path

import copier
import pytest

from hybridtf.cli.new_plugin import TEMPLATE, package_of
from tests.cli.helpers import ROOT, ok, refused, run

EXAMPLE = ROOT / "plugins" / "hybridtf-example"
SPOILS = {"__pycache__", ".pytest_cache", ".hypothesis", "dist", "build"}


def files(folder: Path) -> dict[str, str]:
    """The texts below a folder, without what tools leave there."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not SPOILS & set(path.parts)]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_the_example_is_what_the_template_writes(tmp_path: Path) -> None:
    answers = {"name": "hybridtf-example", "mixer": "gated_ema", "kernel": "windows", "task": "repeat"}
    copier.run_copy(str(TEMPLATE), tmp_path / "made", data=answers, defaults=True, quiet=True)
    made, shown = files(tmp_path / "made"), files(EXAMPLE)
    assert set(made) == set(shown)
    assert [name for name in made if made[name] != shown[name]] == []


@pytest.mark.parametrize("name", ["my-Cool_mixer2", "hybridtf-x", "A", "a.b--c_9"])
def test_names_follow_from_the_name(tmp_path: Path, name: str) -> None:
    result = ok("new-plugin", name, "--path", tmp_path)
    assert f"hybridtf check --plugin {name}" in result.stdout
    made = files(tmp_path / name)
    package = package_of(name)
    assert f"src/{package}/__init__.py" in made
    assert f'"{name}" = "{package}"' in made["pyproject.toml"]
    stem = package.removeprefix("hybridtf_")
    assert f'type: Literal["{stem}_ema"] = "{stem}_ema"' in made[f"src/{package}/mixer.py"]
    for path, text in made.items():
        assert "{{" not in text, path
        assert "xample" not in text, path
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("2fast", "must begin with a letter and hold letters"), ("a b", "must begin with a letter"),
        ("x-", "must begin with a letter"), ("__main__", "must begin with a letter"), ("sub/dir", "must begin with a letter"),
        ("Class", "its package would be called class, which is a word of Python's own"),
        ("json", "as a module of Python's own library"),
        ("torch", "its package would be called torch, as one that is installed"),
        ("HybridTF", "its package would be called hybridtf, as one that is installed"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path, name: str, reason: str) -> None:
    message = refused("new-plugin", name, "--path", tmp_path)
    assert message.startswith(f"{name!r}: ")
    assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_every_word_of_python_is_refused_by_the_template() -> None:
    text = (TEMPLATE / "copier.yml").read_text(encoding="utf-8")
    assert [word for word in keyword.kwlist if word.islower() and f"'{word}'" not in text] == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    assert "exists already; nothing was written" in refused("new-plugin", "mine", "--path", tmp_path)
    assert files(tmp_path) == {"mine/notes": "kept"}
    (tmp_path / "file").symlink_to(tmp_path / "nowhere")
    assert "exists already" in refused("new-plugin", "file", "--path", tmp_path)
    assert "no such folder" in refused("new-plugin", "mine", "--path", tmp_path / "absent")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(source: str, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "pyproject.toml").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(copier, "run_copy", half)
    assert run("new-plugin", "mine", "--path", tmp_path).exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_without_copier_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    assert refused("new-plugin", "mine", "--path", tmp_path) == "new-plugin needs copier: pip install 'hybridtf[new]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_plugin_is_installed_tested_and_trained(tmp_path: Path) -> None:
    def shell(*command: str | Path) -> str:
        done = subprocess.run([str(part) for part in command], cwd=made, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    ok("new-plugin", "my-Cool_mixer2", "--path", tmp_path)
    made, site = tmp_path / "my-Cool_mixer2", tmp_path / "site"
    hidden = ("PYTEST_", "COV_", "COVERAGE_", "HYBRIDTF_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    shell(*pip, "--target", site, made)
    assert " passed" in shell(sys.executable, "-m", "pytest", "-q")
    hybridtf = (sys.executable, "-m", "hybridtf")
    assert "my_cool_mixer2_ema" in json.loads(shell(*hybridtf, "list", "mixers", "--json"))["mixers"]
    results = json.loads(shell(*hybridtf, "check", "--plugin", "my-Cool_mixer2", "--json"))
    assert {result["component"] for result in results} == {
        "mixers.my_cool_mixer2_ema", "tasks.my_cool_mixer2_repeat", "kernels.short_conv/my_cool_mixer2_windows",
    }
    assert all(result["ok"] for result in results)
    shell(*hybridtf, "check", "recipe.toml")
    shell(*hybridtf, "train", "recipe.toml", "-o", tmp_path / "run", "--set", "train.steps=3", "--set", "train.eval_tokens=512")
    assert (tmp_path / "run").is_dir()
