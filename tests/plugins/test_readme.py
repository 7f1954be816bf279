"""The READMEs do what they say: the tutorial's files make a plugin that keeps the laws, and the recipes load."""

import copy
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from hybridtf.core import BuildContext, Role, Segments, using
from hybridtf.plugins import hook_names, load_registries, make_plugin_manager
from hybridtf.recipe import parse_recipe
from hybridtf.testing import laws_for, run_checks
from hybridtf.train import TrainConfig

REPOSITORY = Path(__file__).parents[2]
TUTORIAL = (REPOSITORY / "plugins" / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", TUTORIAL, re.DOTALL))
MODULE = "hybridtf_gated_conv"


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tutorial's files, laid out as pip would install them."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    (points,) = project["entry-points"].items()
    info = tmp_path / "src" / f"{MODULE}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{points[0]}]", *(f"{name} = {target}" for name, target in points[1].items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def test_the_mixer_has_40_lines() -> None:
    code = FILES[f"src/{MODULE}.py"]
    body = code[code.index("class GatedConvConfig"):]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40


def test_the_tutorial_makes_a_plugin_that_keeps_the_laws(tutorial: Path) -> None:
    registries = load_registries(make_plugin_manager(autoload=True))
    assert "hybridtf-gated-conv" not in registries.failures
    assert registries.plugins["hybridtf-gated-conv"] == "0.1.0"
    with using(registries):
        recipe = parse_recipe(tomllib.loads(FILES["recipe.toml"]))
        assert recipe.model.stacks()[0].layers == ("c", "c", "c", "a")
        recipe.model.build()  # type: ignore[call-arg]
        config = registries["mixers"].get("gated_conv").tiny()
        # Compiling takes longest, and is checked in the run of the example plugin.
        results = run_checks("mixers", config, [law for law in laws_for("mixers") if law != "compile"])
    assert {(r.law, r.message) for r in results if not r.ok} == set()
    assert {r.law for r in results if not r.skipped} >= {"cut", "segment", "causal", "crop", "gradients"}


@pytest.mark.slow
def test_the_tutorials_own_test(tutorial: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(FILES["tests/test_gated_conv.py"], "test_gated_conv.py", "exec"), namespace)
    namespace["test_the_laws"]()


PARTS = re.findall(r"<!-- part: (\w+)\.py(?:, after (\w+)\.py)? -->\n```python\n(.*?)```", TUTORIAL, re.DOTALL)


def part_of_the_tutorial(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The part as a module, pasted under the one that it says it comes after."""
    ((after, text),) = [(after, text) for part, after, text in PARTS if part == name]
    module = types.ModuleType(f"hybridtf_readme_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if after:
        vars(module).update((k, v) for k, v in vars(part_of_the_tutorial(after, monkeypatch)).items() if not k.startswith("__"))
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def test_every_snippet_is_a_file_or_a_part_that_is_run() -> None:
    shown = re.findall(r"^ *```python\n(.*?)^ *```", TUTORIAL, re.DOTALL | re.MULTILINE)
    run = [text for _, _, text in PARTS] + [text for name, text in FILES.items() if name.endswith(".py")]
    assert sorted(shown) == sorted(run)
    assert {name for name, _, _ in PARTS} == {"leaky", "scanned", "parts", "task"}  # each has a test of its own


@pytest.mark.parametrize("name", ["leaky", "scanned"])
def test_the_recurrences_keep_the_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = part_of_the_tutorial(name, monkeypatch)
    config = getattr(module, f"{name.capitalize()}Config").tiny()
    results = run_checks("mixers", config, [law for law in laws_for("mixers") if law != "compile"])
    assert {(r.law, r.message) for r in results if not r.ok} == set()
    assert {r.law for r in results if not r.skipped} >= {"cut", "segment", "causal", "crop", "gradients"}


def test_both_recurrences_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = BuildContext(d_model=8, param_dtype=torch.float64)
    leaky = part_of_the_tutorial("leaky", monkeypatch).LeakyConfig().build(ctx)
    scanned = part_of_the_tutorial("scanned", monkeypatch).ScannedConfig().build(ctx)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    segments = Segments.from_lengths([[4, 5], [6]])
    torch.testing.assert_close(leaky(x, segments=segments)[0], scanned(x, segments=segments)[0])


def test_the_roles_of_parameters_are_all_named() -> None:
    assert [role for role in get_args(Role) if f"`{role}`" not in TUTORIAL] == []


def test_the_other_parts_keep_their_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    module = part_of_the_tutorial("parts", monkeypatch)
    for kind, config in (("positions", module.EvenSlopeConfig), ("channel_mixers", module.SparseMLPConfig)):
        results = run_checks(kind, config.tiny(), [law for law in laws_for(kind) if law != "compile"])
        assert {(r.law, r.message) for r in results if not r.ok} == set()
        assert sum(not r.skipped for r in results) >= 8


def test_the_drawn_task_keeps_its_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    config = part_of_the_tutorial("task", monkeypatch).BackwardsConfig
    results = run_checks("tasks", config.tiny())
    assert {(r.law, r.message) for r in results if not r.ok} == set()
    assert {r.law for r in results if not r.skipped} >= {"rows", "resume", "held_out", "ranks", "measures"}
    batch = next(config().load(seed=3).train_batches(4, 32))
    assert batch.targets[:, 16:].equal(batch.inputs[:, :16].flip(1))


def test_the_tutorial_names_every_hook() -> None:
    assert [name for name in hook_names() if f"`{name}`" not in TUTORIAL] == []


def test_the_recipe_of_the_recipes_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "recipes" / "README.md").read_text(encoding="utf-8")
    whole, *pieces = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", text, re.DOTALL))
    recipe = parse_recipe(whole)
    for piece in pieces:  # a section, or options of a block: put into the whole one
        changed = copy.deepcopy(whole)
        changed.update({key: value for key, value in piece.items() if key != "model"})
        for options in piece.get("model", {}).get("blocks", {}).values():
            changed["model"]["blocks"]["a"].update(options)
        parse_recipe(changed, sections={"train": TrainConfig}).model.build(BuildContext(d_model=0, device=torch.device("meta")))
    assert len(pieces) == 4
    assert recipe.model.stacks()[0].pattern == "(m*3 a)*2"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert parse_recipe(tomllib.loads(capsys.readouterr().out)) == namespace["same"]
