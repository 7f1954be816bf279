"""Plugins that fail and recipes with a slip: named, and never fatal or silent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from hybridtf.core import (
    BuildContext,
    ConfigError,
    Norm,
    NormConfig,
    ParamSpec,
    PluginError,
    RecipeError,
    Registries,
    SequenceMixer,
    SequenceMixerConfig,
    active,
    init,
    using,
)
from hybridtf.models import LanguageModelConfig
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.recipe import load_recipe
from hybridtf.train import TrainConfig


class StubbornConfig(SequenceMixerConfig):
    """Its builder raises what a bug raises."""

    type: Literal["stubborn"] = "stubborn"
    size: int

    def build(self, ctx: BuildContext) -> SequenceMixer:
        return {}["no such key"]

    @classmethod
    def tiny(cls):
        return cls(size=1)


class ShortConfig(SequenceMixerConfig):
    """Its mixer loses a token."""

    type: Literal["short"] = "short"

    def build(self, ctx: BuildContext) -> SequenceMixer:
        return Short()

    @classmethod
    def tiny(cls):
        return cls()


class Short(SequenceMixer):
    def init_state(self, batch_size, max_len=None):
        return ()

    def forward(self, x, *, segments=None, state=None, context=None, keep=0):
        return x[:, 1:], state


class RolelessConfig(SequenceMixerConfig):
    """A parameter of its mixer says nothing of itself."""

    type: Literal["roleless"] = "roleless"

    def build(self, ctx: BuildContext) -> SequenceMixer:
        return Roleless()

    @classmethod
    def tiny(cls):
        return cls()


class Roleless(Short):
    def __init__(self):
        super().__init__()
        self.inner = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8))})


class WideConfig(NormConfig):
    """Its norm gives one channel too many, or runs on no device that is here."""

    type: Literal["wide"] = "wide"
    absent: bool = False

    def build(self, ctx: BuildContext) -> Norm:
        return Absent() if self.absent else Wide()

    @classmethod
    def tiny(cls):
        return cls()


class Wide(Norm):
    def forward(self, x):
        return torch.cat([x, x[..., :1]], -1)


class Absent(Norm):
    def forward(self, x):
        raise RuntimeError("needs a device that is not here")


@pytest.fixture
def registries() -> Registries:
    found = load_registries(make_plugin_manager(autoload=False))
    for made in (StubbornConfig, ShortConfig, RolelessConfig):
        found["mixers"].add(made, "somebodys-plugin")
    found["norms"].add(WideConfig, "somebodys-plugin")
    return found


def build(**mixer):
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2}}, "p": {"mixer": mixer}}
    return LanguageModelConfig(vocab_size=5, d_model=8, pattern="a a p", blocks=blocks).build()


def test_a_builder_that_raises_is_traced_to_plugin_layer_and_recipe_key(registries):
    with using(registries), pytest.raises(PluginError) as caught:
        build(type="stubborn", size=3)
    assert str(caught.value).startswith(
        "model.blocks.p.mixer: plugin 'somebodys-plugin' could not build 'stubborn' (layer 2): KeyError: 'no such key' "
        "(test_plugins_and_recipes.py, line "
    )


def test_a_parameter_without_a_role_is_traced_to_plugin_layer_and_recipe_key(registries):
    with using(registries), pytest.raises(ConfigError) as caught:
        build(type="roleless")
    assert str(caught.value).startswith(
        "model.blocks.p.mixer: 'roleless' of plugin 'somebodys-plugin' (layer 2): parameter 'inner.scale' has no role: its "
        "module must name it in param_specs(), as ParamSpec(role, start). Roles: matrix, "
    )


def test_a_role_for_no_parameter_is_traced_to_plugin_layer_and_recipe_key(registries, monkeypatch):
    def specs(self):
        return dict.fromkeys(("inner.scale", "iner.scale"), ParamSpec("norm", init.constant(1.0)))

    monkeypatch.setattr(Roleless, "param_specs", specs, raising=False)
    with using(registries), pytest.raises(ConfigError) as caught:
        build(type="roleless")
    assert str(caught.value).startswith(
        "model.blocks.p.mixer: 'roleless' of plugin 'somebodys-plugin' (layer 2): param_specs() speaks of 'iner.scale', "
        "which is no parameter. Did you mean 'inner.scale'? "
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_of_another_width_is_named_before_the_mixer_after_it_fails(registries, device):
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2}, "norm": {"type": "wide"}}}
    with using(registries):
        config = LanguageModelConfig(vocab_size=5, d_model=8, pattern="a a", blocks=blocks)
        with pytest.raises(PluginError) as caught:
            config.build(BuildContext(d_model=8, device=torch.device(device)))
    assert str(caught.value) == (
        "model.blocks.a.norm: 'wide' of plugin 'somebodys-plugin' (layer 0) returned shape (1, 1, 9) for an input of "
        "(1, 1, 8); a norm must return the shape it was given"
    )
    only = {"a": {"mixer": {"type": "gru"}}}
    with using(registries):
        config = LanguageModelConfig(vocab_size=5, d_model=8, pattern="a", final_norm={"type": "wide"}, blocks=only)
        with pytest.raises(PluginError, match=r"^model\.final_norm: 'wide' of plugin '\S+' returned shape"):
            config.build()


def test_a_norm_that_cannot_run_where_it_is_built_is_built(registries):
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2}, "norm": {"type": "wide", "absent": True}}}
    with using(registries):
        net = LanguageModelConfig(vocab_size=5, d_model=8, pattern="a", blocks=blocks).build()
        with pytest.raises(RuntimeError, match="needs a device"):
            net(torch.tensor([[1, 2, 3]]))


def test_an_option_that_a_plugin_needs_is_named_with_its_key(registries):
    with using(registries), pytest.raises(RecipeError, match=r"blocks\.p\.mixer\.size: is required"):
        build(type="stubborn")


def test_a_plugin_that_returns_another_shape_is_traced_to_plugin_layer_and_recipe_key(registries):
    with using(registries):
        net = build(type="short")
        with pytest.raises(PluginError) as caught:
            net(torch.tensor([[1, 2, 3]]))
    assert str(caught.value) == (
        "model.blocks.p.mixer: 'short' of plugin 'somebodys-plugin' (layer 2) returned shape (1, 2, 8) "
        "for an input of (1, 3, 8); it must return the shape it was given"
    )


RECIPE = """
[model]
type = "language_model"
vocab_size = 16
d_model = 8
pattern = "m a"
{top}
[model.blocks.m]
mixer = {{ type = "mamba2", d_state = 4, head_dim = 4{inner} }}
{block}
[model.blocks.a]
mixer = {{ type = "attention", n_heads = 4, position = {{ type = "rope"{nested} }} }}

[train]
steps = 1
{train}
"""


def recipe(folder: Path, **lines: str) -> Path:
    path = folder / "r.toml"
    empty = dict.fromkeys(("top", "inner", "block", "nested", "train"), "")
    path.write_text(RECIPE.format(**{**empty, **lines}))
    return path


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("1E-3", 1e-3), ("3", 3.0)])
def test_a_rate_is_a_number_however_it_is_written(tmp_path, text, value):
    loaded = load_recipe(recipe(tmp_path, train=f"lr = {text}"), sections={"train": TrainConfig})
    assert type(loaded.train.lr) is float
    assert loaded.train.lr == value


@pytest.mark.parametrize("text", ["'true'", "'1e-5'", "true"])
def test_a_rate_that_is_no_number_is_refused_by_its_key(tmp_path, text):
    with pytest.raises(RecipeError, match=r"train\.lr: input should be a valid number, got "):
        load_recipe(recipe(tmp_path, train=f"lr = {text}"), sections={"train": TrainConfig})


@pytest.mark.parametrize("text", ["08", "null", "1e"])
def test_what_the_file_format_does_not_know_is_refused_with_its_line(tmp_path, text):
    path = recipe(tmp_path, train=f"lr = {text}")
    line = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.startswith("lr"))
    with pytest.raises(RecipeError, match=rf"r\.toml:{line}:"):
        load_recipe(path, sections={"train": TrainConfig})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ({"top": "n_layrs = 2"}, r"model\.n_layrs: unknown option\. Did you mean 'n_layers'"),
        ({"inner": ", n_headz = 4"}, r"model\.blocks\.m\.mixer\.n_headz: unknown option\. Did you mean 'n_heads'"),
        ({"block": "chanel_mixer = {}"}, r"model\.blocks\.m\.chanel_mixer: unknown option\. Did you mean 'channel_mixer'"),
        ({"nested": ", thta = 2.0"}, r"model\.blocks\.a\.mixer\.position\.thta: unknown option\. Did you mean 'theta'"),
        ({"train": "warmpu = 2"}, r"train\.warmpu: unknown option\. Did you mean 'warmup'"),
        ({"train": "d_model = 8"}, r"train\.d_model: unknown option here; it belongs to model"),
        ({"top": "lr = 0.1"}, r"model\.lr: unknown option here; it belongs to train"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_refused_at_every_depth(tmp_path, lines, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe(tmp_path, **lines), sections={"train": TrainConfig})


def test_a_misspelt_option_of_a_plugin_is_refused_too(registries):
    with using(registries), pytest.raises(RecipeError, match=r"blocks\.p\.mixer\.siz: unknown option\. Did you mean 'size'"):
        build(type="stubborn", size=1, siz=2)
    assert "stubborn" not in active()["mixers"]
