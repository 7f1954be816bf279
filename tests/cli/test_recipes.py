"""``show`` and ``check``, and every way in which a recipe can be wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import pytest
import torch
from torch import Tensor

from hybridtf.core import BuildContext, Norm, NormConfig, Registries, active, using
from hybridtf.hookspecs import hookimpl
from hybridtf.models import LanguageModel
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.recipe import load_recipe, recipe_names
from hybridtf.testing import laws_for
from tests.cli.helpers import as_json, ok, refused, run, write_recipe

# -- show --------------------------------------------------------------------------------------------------------------


def test_show_counts_what_the_recipe_builds(recipe: str) -> None:
    found = as_json("show", recipe, "--length", 100)
    model: LanguageModel = load_recipe(recipe).model.build(BuildContext(d_model=0))
    n_params = sum(param.numel() for param in model.parameters())
    assert found["params"]["total"] == sum(found["params"]["by_role"].values()) == n_params
    assert found["stacks"][0]["layers"] == ["m", "a", "m", "a"]
    kv = 2 * 2 * 4 * 4 * 2  # two layers; keys and values of two heads of width four, in float32
    assert found["state_bytes"]["100"]["per_token"] == kv
    assert found["state_bytes"]["100"]["kv"] == 100 * kv
    size = found["state_bytes"]["100"]
    assert size["allocated"] == 100 * kv + size["recurrent"] + size["conv"]


def test_show_draws_the_stack(recipe: str) -> None:
    text = ok("show", recipe).stdout
    assert "tiny: Tiny  (language_model, " in text
    assert "decoder: 4 layers, d_model 16, pattern (m a)*2" in text
    assert "mamba2 d_state=8 head_dim=8 chunk_size=16" in text
    assert "65,536" in text


def test_show_numbers_layers_as_surgery_and_weights_do(recipe: str) -> None:
    lines = [line.split() for line in ok("show", recipe).stdout.splitlines() if "█" in line]
    assert [(line[0], line[1]) for line in lines] == [("0", "m"), ("1", "a"), ("2", "m"), ("3", "a")]


@pytest.mark.parametrize("columns", [20, 30, 50])
def test_show_breaks_no_word_in_a_narrow_terminal(recipe: str, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    wide = ok("show", recipe).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    text = ok("show", recipe).stdout
    whole, narrow = ({w.removesuffix(":") for w in t.replace("─", " ").split()} for t in (wide, text))
    assert whole - {"repeated"} == narrow - {"repeated"}  # the head of cells that are all empty
    assert all(len(line) <= columns or len(line.split()) == 1 for line in text.splitlines())


def test_show_folds_a_deep_stack(recipe: str) -> None:
    text = ok("show", recipe, "--set", "model.pattern=(m*3 a)*", "--set", "model.n_layers=48").stdout
    assert "┐ x12" in text
    assert text.count("mamba2  ") < 5


PUBLISHED = [name for name in recipe_names() if name.startswith("published/")]
FEW = ["published/jamba", "published/zamba2", "published/kimi_linear"]


def test_show_of_every_installed_recipe_allocates_nothing() -> None:
    for name in [*(name for name in recipe_names() if name not in PUBLISHED), *FEW]:
        assert as_json("show", name)["params"]["total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_show_of_every_published_recipe(name: str) -> None:
    text = ok("show", name).stdout
    for part in ("decoder: ", "pattern ", "repeated", "parameters", "state of one row"):
        assert part in text


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_goes_through_all_recipes(recipe: str, tmp_path: Path) -> None:
    result = run("check", write_recipe(tmp_path, "bad", ("d_model", "d_modle")), recipe)
    assert result.exit_code == 2
    assert result.stdout.startswith("tiny: ok, ")
    assert "2 faults" in result.stderr
    assert "model.d_modle: unknown option. Did you mean 'd_model'?" in result.stderr
    assert "model.d_model: is required" in result.stderr


def test_check_as_json(recipe: str, tmp_path: Path) -> None:
    import json

    result = run("check", write_recipe(tmp_path, "bad", ("steps = 4", "steps = 0")), recipe, "--json")
    bad, good = json.loads(result.stdout)
    assert result.exit_code == 2
    assert [bad["ok"], bad["faults"][0]["path"]] == [False, "train.steps"]
    assert [good["ok"], good["patterns"]] == [True, ["(m a)*2"]]


WRONG = {
    "unknown key": (("pattern", "d_modell = 3\npattern"), "model.d_modell: unknown option. Did you mean 'd_model'?"),
    "wrong type": (("d_model = 16", 'd_model = "wide"'), "model.d_model: input should be a valid integer, got 'wide'"),
    "unknown mixer": (('"mamba2"', '"manba2"'), "blocks.m.mixer: no mixer named 'manba2'. Did you mean 'mamba2'?"),
    "pattern": (("n_layers = 4", "n_layers = 5"), "model.pattern: "),
    "heads": (("n_kv_heads = 2", "n_kv_heads = 3"), "n_kv_heads"),
    "missing plugin": (
        ('title = "Tiny"', 'requires = ["hybridtf-nowhere"]'),
        "meta.requires: 'hybridtf-nowhere' is not installed: pip install hybridtf-nowhere",
    ),
    "train": (("steps = 4", "steps = 4\nwarmpu = 2"), "train.warmpu: unknown option. Did you mean 'warmup'?"),
    "kernel": (('"mamba2"', '"mamba2", kernel = "tritn"'), "op 'ssd' has no kernel named 'tritn'. Known: "),
    "no TOML": (("[model]", "[model"), "is no TOML"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_one_line_everywhere(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    file = write_recipe(tmp_path, "bad", change)
    for command in (["check", file], ["show", file], ["train", file, "-o", tmp_path / "run"]):
        error = refused(*command)
        assert message in error
        assert error.startswith(str(file)), "which recipe"
        assert run(*command).stderr.count("\n") == 1, "more than one line"
    assert not (tmp_path / "run").exists()


def test_an_override_is_validated_with_the_file(recipe: str) -> None:
    assert "train.stps: unknown option. Did you mean 'steps'?" in refused("check", recipe, "--set", "train.stps=3")
    assert refused("check", recipe, "--set", "train").startswith("--set: train: must be path=value")


def test_an_unknown_recipe_and_a_missing_file(tmp_path: Path) -> None:
    assert "no recipe named 'demo/hybird'. Did you mean 'demo/hybrid'?" in refused("check", "demo/hybird")
    assert "there is no such file" in refused("show", tmp_path / "none.toml")
    (tmp_path / "dang.toml").symlink_to("gone.toml")
    (tmp_path / "dang2.toml").symlink_to("gone.toml")
    assert refused("show", tmp_path / "dang.toml") == f"{tmp_path / 'dang.toml'}: is a link to 'gone.toml', which is not there"
    assert refused("show", tmp_path / "dong.toml") == f"{tmp_path / 'dong.toml'}: there is no such file"


# -- laws --------------------------------------------------------------------------------------------------------------


class _Honest(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.abs().mean(-1, keepdim=True))


class _Peeking(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)  # over time: a token sees the others


class HonestConfig(NormConfig):
    """A norm that keeps its laws."""

    type: Literal["honest"] = "honest"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        return _Honest()


class PeekingConfig(NormConfig):
    """One that does not."""

    type: Literal["peeking"] = "peeking"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        return _Peeking()


def _with_plugin(*configs: type[NormConfig]) -> Any:
    @hookimpl
    def hybridtf_norms() -> Sequence[type[NormConfig]]:
        return configs

    manager = make_plugin_manager(autoload=False)
    manager.register(SimpleNamespace(hybridtf_norms=hybridtf_norms, __name__="mine"), "mine")
    return using(load_registries(manager, strict=True))


class ShyConfig(HonestConfig):
    """One that cannot say what its smallest instance is."""

    type: Literal["shy"] = "shy"  # type: ignore[assignment]

    @classmethod
    def tiny(cls) -> Self:
        raise ValueError("not today")


def test_a_component_without_a_smallest_instance() -> None:
    with _with_plugin(ShyConfig):
        result = run("check", "--plugin", "mine")
        assert result.exit_code == 1
        assert "ValueError: not today" in result.stdout


class StubbornConfig(HonestConfig):
    """One that cannot be built."""

    type: Literal["stubborn"] = "stubborn"  # type: ignore[assignment]

    def build(self, ctx: BuildContext) -> Norm:
        raise ctx.error("not today")


def test_what_cannot_be_built_is_said_once() -> None:
    with _with_plugin(StubbornConfig):
        result = run("check", "--plugin", "mine")
    assert result.exit_code == 1
    assert result.stdout.count("'stubborn' of plugin 'mine': not today") == 1


def test_laws_of_a_plugin() -> None:
    with _with_plugin(HonestConfig):
        result = ok("check", "--plugin", "mine")
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("norms.honest")]
        marks = line.split()[1:]
        assert len(marks) == len(laws_for("norms"))
        assert set(marks) <= {"+", "."}
        assert "0 failed" in result.stderr
        assert "norms.honest: " in result.stderr


def test_a_broken_law_is_exit_code_one() -> None:
    with _with_plugin(HonestConfig, PeekingConfig):
        result = run("check", "--component", "norms.peeking")
        assert result.exit_code == 1
        assert "\nbroken\n  norms.peeking per_token: token 0 alone differs" in result.stdout
        result = run("check", "--plugin", "mine", "--json")
        assert result.exit_code == 1
        by_component = {r["component"] for r in json.loads(result.stdout) if not r["ok"]}
        assert by_component == {"norms.peeking"}


def test_a_preset_and_the_kernels_of_the_built_ins() -> None:
    lines = ok("check", "--component", "channel_mixers.reglu", "--component", "norms.rms_norm").stdout.splitlines()
    found = [line.split()[0] for line in lines if line.startswith(("channel_mixers.", "norms."))]
    assert found == ["channel_mixers.reglu", "norms.rms_norm"]
    from hybridtf.core import active

    ours = {(kernel.op, kernel.name) for kernel in active().kernels_of("hybridtf")}
    assert ours <= {(op, kernel.name) for op in active().kernels.ops() for kernel in active().kernels.of(op)}
    assert ("ssd", "chunked") in ours


def test_unknown_plugins_and_components() -> None:
    assert refused("check", "--plugin", "hybridft").startswith("no plugin named 'hybridft'. Did you mean 'hybridtf'?")
    assert "no mixer named 'manba2'. Did you mean 'mamba2'?" in refused("check", "--component", "mixers.manba2")
    assert "no registry named 'mixer'. Did you mean 'mixers'?" in refused("check", "--component", "mixer.mamba2")
    assert "must be KIND.NAME" in refused("check", "--component", "mamba2")


def test_check_builds_without_memory(recipe: str) -> None:
    # A trillion parameters: any allocation would fail.
    result = ok("check", recipe, "--set", "model.vocab_size=1000000000000")
    assert "parameters" in result.stdout
    assert torch.get_default_device().type == "cpu"


def test_why_a_required_plugin_was_not_loaded_is_said_once(recipe: str) -> None:
    Path(recipe).write_text(Path(recipe).read_text().replace("[meta]", '[meta]\nrequires = ["pluggy"]'))
    with using(Registries(by_kind=active().by_kind, failures={"pluggy": "OSError: gone"})):
        for command in (["check"], ["show"]):
            assert run(*command, recipe).stderr.splitlines() == [
                "hybridtf: warning: plugin 'pluggy' was not loaded: OSError: gone",
                f"hybridtf: error: {recipe}: meta.requires: the plugin 'pluggy' is installed but was not loaded, "
                "as the warning above says",
            ]
        (found,) = json.loads(run("check", recipe, "--json").stdout)
        assert found["faults"][0]["message"].endswith("was not loaded: OSError: gone")
