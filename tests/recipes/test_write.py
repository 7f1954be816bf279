"""Recipes as text: the round trip, the resolved copy, and the JSON Schema."""

import copy
import math
import platform
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.core import ConfigError, ConfigTable, RecipeError, active, kernels_used
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe, apply_overrides, load_recipe, parse_recipe, recipe_names, recipe_schema, to_toml
from hybridtf.recipe.provenance import commit

SHIPPED = sorted(recipe_names())
LARGE = {name for name in SHIPPED if name.startswith("published/")} - {"published/jamba", "published/zamba2", "published/lfm2"}
"""All are read in tests/cost/test_published.py; most of them are written and held to the schema in the slow suite."""


class TrainTable(ConfigTable):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


def again(recipe: Recipe, **options: Any) -> Recipe:
    return parse_recipe(tomllib.loads(to_toml(recipe)), **options)


def test_there_are_shipped_recipes() -> None:
    assert {"smoke/attention", "smoke/mamba2", "smoke/hybrid"} <= set(SHIPPED)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in SHIPPED])
def test_shipped_recipes_round_trip_and_fit_the_schema(name: str) -> None:
    recipe = load_recipe(name)
    assert again(recipe) == recipe
    validator = jsonschema.Draft202012Validator(recipe_schema())
    validator.validate(tomllib.loads(recipe_names()[name].read_text()))
    validator.validate(tomllib.loads(to_toml(recipe)))


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("smoke/")])
def test_smoke_recipes_build_and_run(name: str) -> None:
    recipe = load_recipe(name)
    model = recipe.model.build()  # type: ignore[call-arg]
    tokens = torch.randint(recipe.model.vocab_size, (2, 7))  # type: ignore[attr-defined]
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    assert abs(loss.item() - math.log(257)) < 1


def test_the_text() -> None:
    block = {"mixer": {"type": "mqa", "n_heads": 2}, "shared": True}
    recipe = Recipe(
        meta={"title": 'a "b"\nc'},  # type: ignore[arg-type]
        model=LanguageModelConfig(vocab_size=16, d_model=8, pattern="a", blocks={"a": block}),  # type: ignore[dict-item]
        train={"lr": 1e-5, "betas": [0.9, 0.95], "name": "x", "deep": {"k.ey": {"z": 1}}},
    )
    assert to_toml(recipe) == """\
[meta]
title = "a \\"b\\"\\nc"

[model]
type = "language_model"
vocab_size = 16
d_model = 8
pattern = "a"
max_seq_len = 2048
stem = { type = "token_embedding", position = { type = "none" }, scale = 1.0, affine = false, dropout = 0.0 }
head = { type = "lm_head", tied = true, bias = false, scale = 1.0 }
final_norm = { type = "rms_norm", eps = 1e-06, weight = true, bias = false, unit_offset = false, round_first = false }
residual_init = "depth"

[model.blocks.a]
type = "prenorm"
shared = true
norm = { type = "rms_norm", eps = 1e-06, weight = true, bias = false, unit_offset = false, round_first = false }
residual_scale = 1.0
skip_scale = 1.0
dropout = 0.0
drop_path = 0.0

[model.blocks.a.mixer]
type = "attention"
n_heads = 2
n_kv_heads = 1
kernel = "auto"
position = { type = "rope", theta = 10000.0, fraction = 1.0, interleaved = false }
qk_norm_over = "head"
qk_norm_after = false
output_gate = false
output_gate_per = "channel"
output_gate_activation = "sigmoid"
value_scale = 1.0
sinks = false
qkv_bias = false
out_bias = false
dropout = 0.0
value_residual = "none"
values_from = "own"
kv_role = "auto"

[train]
lr = 1e-05
betas = [0.9, 0.95]
name = "x"

[train.deep."k.ey"]
z = 1
"""


def test_a_config_of_a_section_round_trips() -> None:
    recipe = load_recipe("smoke/attention", ["train={ lr = 1e-4 }"], sections={"train": TrainTable})
    assert recipe.train == TrainTable(lr=1e-4)
    assert "betas = [0.9, 0.95]" in to_toml(recipe)
    assert again(recipe, sections={"train": TrainTable}) == recipe


@pytest.mark.parametrize("kind", ["mixers", "channel_mixers", "blocks", "models", "tasks", "norms", "positions"])
def test_every_component_round_trips_through_text(kind: str) -> None:
    for name, config in active()[kind].configs().items():
        table = {"x": config.tiny().to_dict()}
        assert active()[kind].make(tomllib.loads(to_toml(table))["x"]) == config.tiny(), name


@pytest.mark.parametrize("value", [None, object(), b"x", {1: 2}])
def test_what_toml_cannot_hold(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.x: (TOML cannot hold|a key must be a string)"):
        to_toml({"train": {"x": value}})


_keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_texts = st.text(st.characters(exclude_categories=["Cs"]))
_scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _texts
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(_keys, _values, max_size=4))
def test_any_table_round_trips(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_not_a_number_and_infinity() -> None:
    back = tomllib.loads(to_toml({"x": [float("inf"), -float("inf"), float("nan")]}))["x"]
    assert back[:2] == [float("inf"), -float("inf")]
    assert math.isnan(back[2])


# -- resolved ----------------------------------------------------------------------------------------------------------


def test_a_resolved_recipe_says_what_was_used_and_loads_again() -> None:
    recipe = load_recipe("smoke/hybrid")
    before = copy.deepcopy(recipe)
    kernels = kernels_used(recipe.model.build())  # type: ignore[call-arg]
    resolved = recipe.resolved(kernels=kernels, seed=7)
    assert recipe == before
    used = resolved.meta.resolved
    assert used is not None
    assert (used.python, used.torch, used.seed) == (platform.python_version(), torch.__version__, 7)
    assert used.kernels == kernels
    assert kernels
    assert "hybridtf" not in used.plugins
    assert again(resolved) == resolved
    assert resolved.model == recipe.model
    jsonschema.validate(tomllib.loads(to_toml(resolved)), recipe_schema())


def test_the_commit_is_left_out_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit.cache_clear()
    monkeypatch.chdir(tmp_path)
    used = load_recipe("smoke/hybrid").resolved().meta.resolved
    assert used is not None
    assert used.commit is None
    commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert load_recipe("smoke/hybrid").resolved().meta.resolved == used
    commit.cache_clear()


# -- schema ------------------------------------------------------------------------------------------------------------


def test_the_schema_is_one_and_whole() -> None:
    schema = recipe_schema({"train": TrainTable})
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["train"]["properties"]["lr"]["type"] == "number"
    refs = _refs(schema)
    assert refs
    assert {ref.removeprefix("#/$defs/") for ref in refs} <= set(schema["$defs"])


def _refs(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        below = set().union(*map(_refs, schema.values()))
        return {*below, schema["$ref"]} if "$ref" in schema else below
    return set().union(*map(_refs, schema)) if isinstance(schema, list) else set()


@pytest.mark.parametrize(
    "override",
    ["model.n_headz=4", "model.blocks.a.mixer.type=nothing", "model.blocks.a.mixer.n_heads='4'", "modle.x=1",
     "meta.titel=x", "model.blocks.a.mixer.window=0", "train.lr='1'", "task.type=nothing"],
)
def test_schema_and_validation_refuse_the_same(override: str) -> None:
    table = tomllib.loads(recipe_names()["smoke/attention"].read_text())
    del table["train"]  # of another table than the one given here
    validator = jsonschema.Draft202012Validator(recipe_schema({"train": TrainTable}))
    assert validator.is_valid(table)
    wrong = apply_overrides(table, [override])
    assert not validator.is_valid(wrong)
    with pytest.raises(RecipeError):
        parse_recipe(wrong, sections={"train": TrainTable})
