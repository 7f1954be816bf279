"""Recipe files: what loads, and every way a file can be wrong with its full message."""

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from hybridtf import core
from hybridtf.core import ConfigTable, RecipeError, Registries, active, known_names, using
from hybridtf.models import LanguageModelConfig
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.recipe import Recipe, apply_overrides, load_recipe, parse_recipe, recipe_names

GOOD = """
[meta]
title = "small"

[model]
type = "language_model"
vocab_size = 16
d_model = 8
n_layers = 4
pattern = "(m a)*"

[model.blocks.m]
mixer = { type = "mamba2", d_state = 4, head_dim = 4 }

[model.blocks.a]
mixer = { type = "gqa", n_heads = 4, n_kv_heads = 2 }
channel_mixer = { type = "swiglu", d_ff = 16 }
"""


class TrainTable(ConfigTable):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int = 10


class ForeignTrain(BaseModel):
    """A section need not be one of our own tables."""

    model_config = ConfigDict(strict=True, extra="forbid")
    lr: float = 1e-3
    sizes: tuple[int, ...] = ()


SECTIONS = {"train": TrainTable}


@pytest.fixture(scope="module")
def built_in() -> Registries:
    return load_registries(make_plugin_manager(autoload=False))


@pytest.fixture(autouse=True)
def _only_what_is_built_in(built_in: Registries) -> Iterator[None]:
    """Messages list what is known, which an installed plugin adds to."""
    with using(built_in):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(GOOD)
    return path


def changed(*overrides: str) -> dict[str, Any]:
    return apply_overrides(tomllib.loads(GOOD), overrides)


def message(call: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call()
    assert caught.value.exit_code == 2
    return str(caught.value)


MAMBA2 = (
    "a_range, bias, chunk_size, conv_bias, conv_kernel, d_conv, d_state, dt_floor, dt_limit, dt_range, eps, expand, "
    "head_dim, in_scale, kernel, n_groups, n_heads, norm, norm_first"
)
BUILT_IN = load_registries(make_plugin_manager(autoload=False))
MIXERS, TASKS = (BUILT_IN[kind].names() for kind in ("mixers", "tasks"))
MODEL = "blocks, d_model, final_norm, head, max_seq_len, merge, n_layers, pattern, residual_init, spread, stem, vocab_size"


# -- what loads --------------------------------------------------------------------------------------------------------


def test_a_file(file: Path) -> None:
    recipe = load_recipe(file)
    assert load_recipe(str(file)) == recipe
    assert isinstance(recipe.model, LanguageModelConfig)
    assert recipe.meta.title == "small"
    assert recipe.model.stacks()[0].layers == ("m", "a", "m", "a")
    assert recipe.task is None
    assert recipe.train is None
    assert recipe.model.blocks["m"].type_name() == "prenorm"


def test_python_gives_the_same(file: Path) -> None:
    recipe = load_recipe(file)
    by_hand = LanguageModelConfig(
        vocab_size=16, d_model=8, n_layers=4, pattern="(m a)*",
        blocks={
            "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},  # type: ignore[dict-item]
            "a": active()["blocks"].make({
                "type": "prenorm", "mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2},
                "channel_mixer": {"type": "swiglu", "d_ff": 16},
            }),
        },
    )
    assert Recipe(meta={"title": "small"}, model=by_hand) == recipe  # type: ignore[arg-type]


def test_a_recipe_is_frozen(file: Path) -> None:
    with pytest.raises(Exception, match="frozen"):
        load_recipe(file).model = None  # type: ignore[misc, assignment]


def test_train_stays_a_plain_table_or_becomes_the_config_given() -> None:
    table = changed("train.lr=1e-4", "train.betas=[0.9, 0.99]")
    assert parse_recipe(table).train == {"lr": 1e-4, "betas": (0.9, 0.99)}
    assert parse_recipe(table, sections=SECTIONS).train == TrainTable(lr=1e-4, betas=(0.9, 0.99))
    foreign = parse_recipe(changed("train.sizes=[1, 2]"), sections={"train": ForeignTrain})
    assert foreign.train == ForeignTrain(sizes=(1, 2))
    assert foreign.to_dict()["train"] == {"lr": 1e-3, "sizes": [1, 2]}
    assert parse_recipe(changed(), sections=SECTIONS).train is None


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "w.toml"
    other.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(other) == load_recipe(file)


def test_a_file_without_the_ending(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "recipe"
    other.write_text(GOOD)
    assert load_recipe(str(other)) == load_recipe(file)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "shipped"
    (path / "demo").mkdir(parents=True)
    (path / "demo" / "hybrid.toml").write_text(GOOD)
    registries = core.Registries(by_kind=active().by_kind, kernels=active().kernels, recipe_folders=[path])
    with using(registries):
        yield path


def test_names(folder: Path) -> None:
    assert recipe_names() == {"demo/hybrid": folder / "demo" / "hybrid.toml"}
    assert load_recipe("demo/hybrid").meta.title == "small"


def test_an_unknown_name(folder: Path) -> None:
    assert message(lambda: load_recipe("demo/hybrd")) == (
        "no recipe named 'demo/hybrd'. Did you mean 'demo/hybrid'? Known: demo/hybrid"
    )


def test_a_name_never_leaves_its_folder(folder: Path) -> None:
    (folder.parent / "secret.toml").write_text(GOOD)
    assert message(lambda: load_recipe("../secret")) == "no recipe named '../secret'. Known: demo/hybrid"


def test_a_shipped_recipe_asked_for_as_a_file(folder: Path) -> None:
    assert message(lambda: load_recipe("demo/hybrid.toml")) == (
        "demo/hybrid.toml: there is no such file. An installed recipe is called 'demo/hybrid'"
    )


# -- files that cannot be read -----------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path, file: Path) -> None:
    missing = tmp_path / "q.toml"
    assert message(lambda: load_recipe(missing)) == f"{missing}: there is no such file. Did you mean {str(file)!r}?"
    nowhere = tmp_path / "no" / "q.toml"
    assert message(lambda: load_recipe(nowhere)) == f"{nowhere}: there is no such file"


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "x.toml").mkdir()
    for source in (tmp_path, str(tmp_path), tmp_path / "x.toml"):
        said = message(lambda source=source: load_recipe(source))
        assert said == f"{source}: is a directory; a recipe is a .toml file"


def test_an_unreadable_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert message(lambda: load_recipe(file)) == f"{file}: cannot be read: Permission denied"


def test_not_utf8(file: Path) -> None:
    file.write_bytes(b"[meta]\ntitle = \"caf\xe9\"\n")
    assert message(lambda: load_recipe(file)) == f"{file}:2:13: is not UTF-8 text: byte 0xe9"


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("[meta]\ntitle = \"a\n", "2:11", "is no TOML: illegal character '\\n'"),
        ("[train]\nwarmup = 08\n", "2:11", "is no TOML: expected newline or end of document after a statement"),
        ("[train]\nwarmup = null\n", "2:10", "is no TOML: invalid value"),
        ("a = 1\na = 2\n", "2:6", "is no TOML: cannot overwrite a value"),
        ("a = ", "1:5", "is no TOML: invalid value"),
        ("[model\n", "1:7", "is no TOML: expected ']' at the end of a table declaration"),
    ],
)
def test_toml_syntax(file: Path, text: str, where: str, reason: str) -> None:
    file.write_text(text)
    assert message(lambda: load_recipe(file)) == f"{file}:{where}: {reason}"


# -- faults inside -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.n_headz=4", f"model.n_headz: unknown option. Known: {MODEL}"),
        ("model.blocks.m.mixer.n_headz=4",
         f"model.blocks.m.mixer.n_headz: unknown option. Did you mean 'n_heads'? Known: {MAMBA2}"),
        ("model.blocks.a.mixer.position.thta=1.0",
         "model.blocks.a.mixer.position: needs type = one of alibi, learned, none, rope, sinusoidal, xpos"),
        ("model.blocks.a.mixer.position={type = 'rope', thta = 1.0}",
         "model.blocks.a.mixer.position.thta: unknown option. Did you mean 'theta'? "
         "Known: fraction, interleaved, scaling, theta"),
        ("model.blocks.a.mixer.position={type = 'rope', scaling = {type = 'yarnn', factor = 2.0}}",
         "model.blocks.a.mixer.position.scaling: no scaling of type 'yarnn'. Did you mean 'yarn'? "
         "Known: dynamic_ntk, linear, llama3, longrope, ntk, proportional, yarn"),
        ("model.blocks.a.mixer.position={type = 'rope', scaling = {type = 'linear', factor = 2.0, factr = 2.0}}",
         "model.blocks.a.mixer.position.scaling.factr: unknown option. Did you mean 'factor'? Known: factor"),
        ("model.blocks.a.mixer.position={type = 'rope', scaling = {factor = 2.0}}",
         "model.blocks.a.mixer.position.scaling: needs type = one of "
         "dynamic_ntk, linear, llama3, longrope, ntk, proportional, yarn"),
        ("model.blocks.m.mixer.type=mambo2",
         f"model.blocks.m.mixer: no mixer named 'mambo2'. {known_names('mambo2', MIXERS, 'hybridtf list mixers')}"),
        ("model.type=language_modle",
         "model: no model named 'language_modle'. Did you mean 'language_model'? Known: language_model"),
        ("model.vocab_size=0", "model.vocab_size: input should be greater than 0, got 0"),
        ("model.vocab_size='16'", "model.vocab_size: input should be a valid integer, got '16'"),
        ("model.residual_init=dept",
         "model.residual_init: input should be 'depth' or 'zero', got 'dept'. Did you mean 'depth'?"),
        ("model.blocks.a.mixer=gqq", """model.blocks.a.mixer: must be a mixer, a table as in { type = "gqa" }, got 'gqq'"""),
        ("model.blocks.b={}", "model.blocks.b"),
        ("model.pattern=(m b)*",
         "model.pattern: pattern '(m b)*', column 4: no block named 'b'. Known: a, m"),
        ("model.pattern=m*",
         "model.blocks.a: no layer of the pattern 'm*' uses this block; use it or take it out"),
        ("model.n_layers=5",
         "model.pattern: pattern '(m a)*' gives a multiple of 2, which does not come out at n_layers = 5; "
         "4 or 6 would fit"),
        ("modle={}", "modle: unknown section. Did you mean 'model'? Known: meta, model, task, train"),
        ("nothing=3", "nothing: unknown option outside a section. Known: meta, model, task, train"),
        ("meta.titel=x",
         "meta.titel: unknown option. Did you mean 'title'? Known: description, requires, resolved, source, title"),
        ("meta.requires=['a>=1']",
         "meta.requires: 'a>=1' is no name of a distribution (write the name alone, without a version)"),
        ("meta.requires=[3]", "meta.requires[0]: input should be a valid string, got 3"),
        ("train=3", "train: must be a table, not int"),
        ("task.type=txt", f"task: no task named 'txt'. {known_names('txt', TASKS, 'hybridtf list tasks')}"),
        ("train.lr='1e-5'", "train.lr: input should be a valid number, got '1e-5'"),
        ("train.lr=true", "train.lr: input should be a valid number, got True"),
        ("train.stepz=3", "train.stepz: unknown option. Did you mean 'steps'? Known: betas, lr, steps"),
        ("model.lr=0.1", f"model.lr: unknown option here; it belongs to train. Known here: {MODEL}"),
        ("lr=0.1", "lr: unknown option here; it belongs to train. Known here: meta, model, task, train"),
        ("train.d_model=8", "train.d_model: unknown option here; it belongs to model. Known here: betas, lr, steps"),
        ("model.blocks.a.d_ff=8",
         "model.blocks.a.d_ff: unknown option here; it belongs to model.blocks.a.channel_mixer. "
         "Known here: adapters, channel_mixer, channel_norm, drop_path, dropout, laurel, learned_scale, mixer, mixer_norm, "
         "norm, residual_scale, shared, skip_scale, stream_scale"),
        ("model.blocks.m.mixer.n_kv_heads=2",
         "model.blocks.m.mixer.n_kv_heads: unknown option here; it belongs to model.blocks.a.mixer. "
         f"Known here: {MAMBA2}"),
    ],
)
def test_one_fault(override: str, fault: str) -> None:
    said = message(lambda: parse_recipe(changed(override), "r.toml", sections=SECTIONS))
    if override == "model.blocks.b={}":
        assert said.startswith("r.toml: 2 faults\n  model.blocks.b: ")
        assert said.endswith("model.blocks.b: no layer of the pattern '(m a)*' uses this block; use it or take it out")
    else:
        assert said == f"r.toml: {fault}"


def test_a_missing_model() -> None:
    assert message(lambda: parse_recipe({}, "r.toml")) == "r.toml: model: is required"
    assert message(lambda: parse_recipe({"model": {}}, "r.toml")) == "r.toml: model: needs type = one of language_model"
    assert message(lambda: parse_recipe({"model": 3}, "r.toml")) == (
        'r.toml: model: must be a model, a table as in { type = "language_model" }, got 3'
    )


def test_every_fault_at_once() -> None:
    table = changed(
        "model.blocks.m.mixer.n_headz=4", "model.blocks.a.mixer.n_heads='4'", "model.d_modle=8", "train.lr='1e-5'",
        "model.pattern=(m x)*", "mata.title=x", "task.type=text", "task.held_out=2.0",
    )
    said = message(lambda: parse_recipe(table, "r.toml", sections=SECTIONS))
    assert said == "\n".join([
        "r.toml: 8 faults",
        f"  model.blocks.m.mixer.n_headz: unknown option. Did you mean 'n_heads'? Known: {MAMBA2}",
        "  model.blocks.a.mixer.n_heads: input should be a valid integer, got '4'",
        f"  model.d_modle: unknown option. Did you mean 'd_model'? Known: {MODEL}",
        "  task.held_out: input should be less than 1, got 2.0",
        "  mata: unknown section. Did you mean 'meta'? Known: meta, model, task, train",
        "  train.lr: input should be a valid number, got '1e-5'",
        "  model.pattern: pattern '(m x)*', column 4: no block named 'x'. Known: a, m",
    ]).replace("8 faults", "7 faults")


def test_foreign_sections_give_the_same_faults() -> None:
    said = message(lambda: parse_recipe(changed("train.lr=x", "train.size=3"), sections={"train": ForeignTrain}))
    assert said == (
        "2 faults\n  train.lr: input should be a valid number, got 'x'\n"
        "  train.size: unknown option. Did you mean 'sizes'? Known: lr, sizes"
    )


# -- requires ----------------------------------------------------------------------------------------------------------


def test_missing_plugins_come_first_and_alone() -> None:
    names = ["hybridtf-nowhere", "pluggy", "hybridtf-elsewhere"]
    table = changed(f"meta.requires={names}", "model.blocks.m.mixer.type=unknown")
    assert message(lambda: parse_recipe(table, "r.toml")) == (
        "r.toml: 2 faults\n"
        "  meta.requires: 'hybridtf-nowhere' is not installed: pip install hybridtf-nowhere\n"
        "  meta.requires: 'hybridtf-elsewhere' is not installed: pip install hybridtf-elsewhere"
    )


def test_installed_plugins_are_enough() -> None:
    assert parse_recipe(changed("meta.requires=['pluggy']")).meta.requires == ("pluggy",)


def test_a_required_plugin_that_failed_to_load() -> None:
    registries = core.Registries(by_kind=active().by_kind, failures={"pluggy": "OSError: gone"})
    with using(registries):
        said = message(lambda: parse_recipe(changed("meta.requires=['pluggy']"), "r.toml"))
    assert said == "r.toml: meta.requires: the plugin 'pluggy' is installed but was not loaded: OSError: gone"


def test_a_required_plugin_that_is_kept_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    points = metadata.EntryPoints([metadata.EntryPoint("pluggy", "pluggy", "hybridtf")])
    brings = SimpleNamespace(version="1.0", entry_points=points)
    monkeypatch.setattr(metadata, "distribution", lambda name: brings)
    table = changed("meta.requires=['pluggy']", "model.blocks.m.mixer.type=unknown")
    assert message(lambda: parse_recipe(table, "r.toml")) == (
        "r.toml: meta.requires: 'pluggy' is installed, but installed plugins are not loaded here; "
        "is HYBRIDTF_DISABLE_PLUGIN_AUTOLOAD set?"
    )
    with using(core.Registries(by_kind=active().by_kind, plugins={"pluggy": "1.0"})):
        assert parse_recipe(changed("meta.requires=['pluggy']")).meta.requires == ("pluggy",)


# -- overrides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("x=128", 128), ("x = 128 ", 128), ("x=1e-5", 1e-5), ("x=1.0e-5", 1e-5), ("x=1E-3", 1e-3), ("x=-2", -2),
        ("x=true", True), ("x=[0.9, 0.95]", [0.9, 0.95]), ("x={ type = 'gqa' }", {"type": "gqa"}), ("x=gqa", "gqa"),
        ("x='128'", "128"), ('x="a=b"', "a=b"), ("x=(m*3 a)*", "(m*3 a)*"), ("x=runs/a.txt", "runs/a.txt"),
        ("x=none", "none"), ('x=""', ""), ("x=True", "True"), ("x=inf", float("inf")), ("x=a # b", "a # b"),
    ],
)
def test_override_values(override: str, value: Any) -> None:
    got = apply_overrides({}, [override])
    assert got == {"x": value}
    assert type(got["x"]) is type(value)


def test_overrides_reach_deep_in_order_and_copy() -> None:
    table = {"a": {"b": {"c": 1}}}
    got = apply_overrides(table, ["a.b.c=2", "a.b.c=3", "a.d.e=4", "f=5"])
    assert got == {"a": {"b": {"c": 3}, "d": {"e": 4}}, "f": 5}
    assert table == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.d_model", "must be path=value, such as model.d_model=128"),
        ("=3", "must be path=value, such as model.d_model=128"),
        ("a..b=3", "must be path=value, such as model.d_model=128"),
        ("a b=3", "must be path=value, such as model.d_model=128"),
        ("x=", 'has no value; an empty string is written ""'),
        ("x=null", "TOML has no null: leave the option out of the recipe instead"),
        ("x=08", "08 is no TOML value (Expected newline or end of document after a statement); a string needs quotes"),
        ("x=[1, 2", "[1, 2 is no TOML value (Unclosed array); a string needs quotes"),
        ("x=-a", "-a is no TOML value (Invalid value); a string needs quotes"),
        ("a.b.c=3", "a.b is 1, not a table, so it has no 'c'"),
    ],
)
def test_override_faults(override: str, reason: str) -> None:
    assert message(lambda: apply_overrides({"a": {"b": 1}}, [override])) == f"--set: {override}: {reason}"


def test_all_override_faults_at_once() -> None:
    assert message(lambda: apply_overrides({}, ["a", "b=2", "c=null"])).startswith("--set: 2 faults\n  a: ")


def test_an_unknown_path_is_caught_by_validation(file: Path) -> None:
    assert message(lambda: load_recipe(file, ["model.blocks.z.mixer.type=gqa"])) == (
        f"{file}: 3 faults\n"
        "  model.blocks.z.mixer.n_kv_heads: is required by 'gqa'\n"
        "  model.blocks.z.mixer.n_heads: is required\n"
        "  model.blocks.z: no layer of the pattern '(m a)*' uses this block; use it or take it out"
    )
    assert load_recipe(file, ["model.d_model=16"]).model.d_model == 16  # type: ignore[attr-defined]


def test_an_override_that_changes_the_mixer_keeps_the_other_options(file: Path) -> None:
    said = message(lambda: load_recipe(file, ["model.blocks.m.mixer.type=mqa"]))
    assert "model.blocks.m.mixer.d_state: unknown option" in said
    assert "model.blocks.m.mixer.n_heads: is required" in said
    recipe = load_recipe(file, ["model.blocks.m.mixer={type = 'mqa', n_heads = 2}"])
    assert recipe.model.blocks["m"].mixer.n_kv_heads == 1  # type: ignore[attr-defined]
