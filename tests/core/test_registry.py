"""Registries: names, presets, and which registries are in force."""

import threading
from typing import Literal, Self

import pytest

from hybridtf import core
from hybridtf.core import BuildContext, Norm, NormConfig, PluginError, Preset, Registries, Registry, active, using


class ScaleConfig(NormConfig):
    type: Literal["scale"] = "scale"
    factor: float
    shift: float = 0.0

    @classmethod
    def tiny(cls) -> Self:
        return cls(factor=2.0)

    def build(self, ctx: BuildContext) -> Norm:
        raise NotImplementedError


@pytest.fixture
def norms() -> Registry:
    registry = Registry("norms")
    registry.add(ScaleConfig, "first")
    registry.add(Preset("double", "scale", {"factor": 2.0}), "first")
    registry.add(Preset("shifted", "scale", requires=("shift",)), "second")
    return registry


def test_names_and_origins(norms: Registry) -> None:
    assert norms.names() == ["double", "scale", "shifted"]
    assert list(norms) == norms.names()
    assert "double" in norms
    assert "triple" not in norms
    assert norms.origin("shifted") == "second"
    assert norms.configs() == {"scale": ScaleConfig}
    assert sorted(norms.presets()) == ["double", "shifted"]
    assert norms.get("double") is ScaleConfig


def test_make(norms: Registry) -> None:
    assert norms.make({"type": "scale", "factor": 3}) == ScaleConfig(factor=3.0)
    assert norms.make({"type": "double", "shift": 1.0}) == ScaleConfig(factor=2.0, shift=1.0)
    assert norms.make({"type": "double", "factor": 2.0}) == ScaleConfig(factor=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs type = one of double, scale, shifted"),
        ({"type": 3}, "needs type = one of double, scale, shifted"),
        ({"type": "scal"}, "no norm named 'scal'. Did you mean 'scale'? Known: double, scale, shifted"),
        ({"type": "zzz"}, "no norm named 'zzz'. Known: double, scale, shifted"),
        ({"type": "double", "factor": 3.0}, "factor: is fixed to 2.0 by 'double'; use type = 'scale' to set it to 3.0"),
        ({"type": "shifted", "factor": 3.0}, "shift: is required by 'shifted'"),
        ({"type": "shifted"}, "2 faults\n  shift: is required by 'shifted'\n  factor: is required"),
        ({"type": "scale"}, "factor: is required"),
    ],
)
def test_make_refuses(norms: Registry, options: dict[str, object], message: str) -> None:
    with pytest.raises(core.ConfigError) as caught:
        norms.make(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ScaleConfig, "norms: the name 'scale' is already registered by first"),
        (Preset("scale", "scale"), "norms: the name 'scale' is already registered by first"),
        (Preset("double", "scale"), "norms: the name 'double' is already registered by first"),
        (Preset("other", "batch"), "norms: preset 'other' stands for 'batch', which is not registered"),
        (Preset("of-preset", "double"), "norms: preset 'of-preset' stands for 'double', which is not registered"),
        (Preset("other", "scale", {"fctor": 1}), "norms: preset 'other' names 'fctor', which is no option of 'scale'"),
        (Preset("other", "scale", requires=("x",)), "norms: preset 'other' names 'x', which is no option of 'scale'"),
    ],
)
def test_add_refuses(norms: Registry, entry: type[NormConfig] | Preset, message: str) -> None:
    before = norms.names()
    with pytest.raises(PluginError) as caught:
        norms.add(entry, "third")
    assert str(caught.value) == message
    assert norms.names() == before


def test_unknown_names(norms: Registry) -> None:
    for ask in (norms.get, norms.origin):
        with pytest.raises(core.UnknownNameError, match=r"no norm named 'scales'\. Did you mean 'scale'"):
            ask("scales")
    with pytest.raises(core.UnknownNameError, match=r"no registry named 'norm'\. Did you mean 'norms'"):
        Registries()["norm"]


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(core.ConfigError, match=r"needs type = one of \(nothing is registered\)"):
        Registry("heads").make({})


def test_using_is_nested_and_left_on_errors() -> None:
    outer, inner = Registries(), Registries()
    with using(outer):
        assert active() is outer
        with using(inner):
            assert active() is inner
        with pytest.raises(ZeroDivisionError), using(inner):
            _ = 1 // 0
        assert active() is outer


def test_using_does_not_leak_into_other_threads() -> None:
    seen: list[Registries] = []
    mine = Registries()
    with using(mine):
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
    assert seen[0] is not mine
    assert "attention" in seen[0]["mixers"]


def test_the_default_is_loaded_once() -> None:
    assert active() is active()
    assert active().plugins["hybridtf"]


@pytest.mark.parametrize(
    ("kind", "word"), [("mixers", "mixer"), ("channel_mixers", "channel mixer"), ("tasks", "task")]
)
def test_singular(kind: str, word: str) -> None:
    assert core.singular(kind) == word
