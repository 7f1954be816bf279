"""An exception in a plugin's code: which component, of which plugin, in which layer and line; and how much of the traceback."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridtf import LanguageModelConfig
from hybridtf.cli.traces import TRACEBACK, explain
from hybridtf.core import using
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.testing import run_checks
from tests.cli.helpers import MAMBA, ROOT, environment, write_recipe

CODE = '''
from typing import Literal, Self

from hybridtf import BuildContext, SequenceMixerConfig, hookimpl
from hybridtf.core import RecurrentMixer


class BoomConfig(SequenceMixerConfig):
    """Fails."""

    type: Literal["boom"] = "boom"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> "Boom":
        return Boom()


class Boom(RecurrentMixer):
    def init_state(self, batch_size, max_len=None):
        return ()

    def mix(self, x, segments, state, *, edges=None):
        return deeper(x), state


def deeper(x):
    return x / {}["gone"]


@hookimpl
def hybridtf_mixers():
    return [BoomConfig]
'''

LINE = next(i for i, line in enumerate(CODE.splitlines(), 1) if "gone" in line)
WHO = "model.blocks.b.mixer: 'boom' of plugin 'htf-boom'"
WHY = f"KeyError: 'gone' (htf_boom.py, line {LINE})"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The plugin, as pip would lay it out."""
    place = tmp_path / "site"
    info = place / "htf_boom-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "htf_boom.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: htf-boom\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hybridtf]\nhtf-boom = htf_boom\n")
    return place


@pytest.fixture
def plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin, inside this process."""
    monkeypatch.syspath_prepend(str(site))
    registries = load_registries(make_plugin_manager(autoload=False))
    registries["mixers"].add(importlib.import_module("htf_boom").BoomConfig, "htf-boom")
    with using(registries):
        yield
    sys.modules.pop("htf_boom", None)


def program(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a folder, with the plugin installed."""
    return subprocess.run(
        [sys.executable, "-m", "hybridtf", *arguments], capture_output=True, text=True, cwd=folder, check=False, timeout=120,
        env=environment(PYTHONPATH=f"{ROOT}:{site}"),
    )  # fmt: skip


def explained(pattern: str, **block: object) -> tuple[str, str]:
    blocks = {"b": {"mixer": {"type": "boom"}, **block}, "a": {"mixer": {"type": "attention", "n_heads": 2}}}
    model = LanguageModelConfig(vocab_size=5, d_model=8, pattern=pattern, blocks=blocks).build()
    with pytest.raises(KeyError) as caught:
        model(torch.tensor([[1, 2, 3]]))
    return explain(caught.value)


def test_the_component_the_layer_and_the_line_are_named_under_the_plugins_own_frames(plugin: None) -> None:
    trace, said = explained("a a b")
    assert said.startswith(f"error: in {WHO} (layer 2): {WHY}. This is a bug in the plugin, not a mistake of yours; ")
    assert trace.startswith("Traceback (most recent call last):\n")
    files = [line.split('"')[1] for line in trace.splitlines() if line.startswith('  File "')]
    assert [Path(file).name for file in files] == ["htf_boom.py"] * 2
    assert trace.endswith("KeyError: 'gone'\n")


def test_all_frames_are_shown_where_they_are_asked_for(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACEBACK, "full")
    trace, said = explained("b a")
    assert said.endswith("not a mistake of yours")
    assert "compose.py" in trace
    assert trace.count('File "') > 10


def test_a_shared_block_is_named_by_the_layer_that_visits_it(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    deeper = sys.modules["htf_boom"].deeper
    monkeypatch.setattr(sys.modules["htf_boom"], "deeper", lambda x: x if not calls.append(0) and len(calls) < 3 else deeper(x))
    _, said = explained("b a b a b", shared=True)
    assert f"{WHO} (layer 4)" in said


def test_what_no_plugin_has_to_do_with_keeps_every_frame() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018 - raised by nobody's component
    trace, said = explain(caught.value)
    assert "test_traces.py" in trace
    assert said.startswith("this is a bug in hybridtf or a plugin")


def test_the_kit_says_the_line_too(plugin: None) -> None:
    (result,) = run_checks("mixers", sys.modules["htf_boom"].BoomConfig.tiny(), ["shape"])
    assert result.message == WHY


def test_training_ends_with_it(site: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "tiny", (MAMBA, '\n[model.blocks.m]\nmixer = { type = "boom" }\n'))
    done = program(site, tmp_path, "train", recipe, "-o", "run")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith(f"hybridtf: error: in model.blocks.m.mixer: 'boom' of plugin 'htf-boom' (layer 0): {WHY}. ")
    assert len(lines) < 12
    assert not (tmp_path / "run").exists()


def test_a_check_names_the_line_and_leaves_nothing_where_it_was_called(site: Path, tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    done = program(site, place, "check", "--plugin", "htf-boom")
    assert done.returncode == 1
    assert f"mixers.boom cut: {WHY}" in done.stdout
    assert "smallest case found" in done.stdout
    assert list(place.iterdir()) == []
