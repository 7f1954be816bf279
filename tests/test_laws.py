"""Everything that is registered keeps the laws of its contract: the kit over the registries, without a table."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybridtf.core import ComponentConfig, ConfigError, Kernel, KernelError, active
from hybridtf.testing import (
    NotApplicableError,
    Subject,
    check_kernel,
    laws_for,
    laws_segments,
    laws_time,
    option_variants,
    preset_config,
    run_checks,
    run_law,
)
from hybridtf.testing.laws_outside import check_compile

LAWS_OF_VARIANTS = ("shape", "empty", "cut", "segment", "causal", "gradients", "finite", "state_bytes")
"""Each finds broken mixers (tests/testing/broken) that the others let pass; what is left is about copies, crops and files."""
LAYOUTS_OF_VARIANTS = ("packed", "middle padding", "right padding", "one column")
"""Documents without pads, pads before, between and after them, rows of pads alone, and decode."""
CUTS_OF_VARIANTS = ((1,) * laws_time.LENGTH, (5, 8), (4, 0, 9))
"""Token by token, in two pieces, and with a call of no tokens."""
LAWS_OF_STARTS = ("gradients", "finite")
"""What an option that only says where parameters start can still break."""
POSITIONS_OF = ("attention", "cca", "dilated", "linear_attention", "mla")
"""Mixers that are held to every position: of each base that tells positions, one."""
LAWS_OF_PRESETS = ("config", "shape", "cut", "segment", "gradients", "compile")
"""A preset is the code of its base with other options."""
STARTS = ("a_range", "dt_floor", "dt_range")
"""Options that say where parameters start."""
COMPILED = {
    "mixers": (
        "attention", "gated_delta_net", "gla", "griffin_recurrent", "gru", "mamba", "mamba2", "mla", "mlstm", "moba", "rwkv7",
        "sliding_attention",
    ),
    "channel_mixers": ("mlp", "moe", "swiglu"),
    "blocks": ("hyper_connections", "prenorm"),
}
"""Of most sorts of op, and of each leaf of a state, one that is compiled in the default suite too, in every way of calling it.
The others are slow, and all of some ops with them: ``gather_attention``, ``wkv``, ``long_conv``, ``state_space``,
``path_attention``, ``stick_breaking``, ``mesa``, ``titans``, ``ttt`` and Mamba 3's. That whole rows of every mixer can be
compiled, tests/field/test_compile.py holds in the default suite."""
NOT_OF = {
    ("cosformer", "max_distance"): "finite",  # says how long a document may be, and refuses the law's long call
    ("multi_scale", "mixer"): "state_bytes",  # keys of pooled blocks grow with whole blocks, not with tokens
}
"""The law that does not apply to a mixer with this option changed."""
KERNELS_BY_NAME = ("conv_kernel", "kernel")
"""Options that choose a kernel, which has a law of its own."""


def _components() -> list[tuple[str, str]]:
    return [(kind, name) for kind, registry in active().by_kind.items() for name in registry.names()]


def _config(kind: str, name: str) -> ComponentConfig:
    registry = active()[kind]
    return preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()


def _laws(kind: str, name: str) -> tuple[str, ...]:
    # A preset of a task is the same code at a published size, which takes long to read through.
    if name not in active()[kind].presets():
        return laws_for(kind)
    return ("config",) if kind == "tasks" else tuple(law for law in laws_for(kind) if law in LAWS_OF_PRESETS)


def _case(kind: str, name: str, law: str) -> Any:
    slow = law == "compile" and name not in COMPILED.get(kind, (name,))
    return pytest.param(kind, name, law, id=f"{kind}-{name}-{law}", marks=[pytest.mark.slow] if slow else [])


LAWS = [_case(kind, name, law) for kind, name in _components() for law in _laws(kind, name)]


def test_what_is_compiled_in_the_default_suite_exists() -> None:
    assert not [name for kind, names in COMPILED.items() for name in names if name not in active()[kind].names()]


@pytest.mark.parametrize(("kind", "name", "law"), LAWS)
def test_law(kind: str, name: str, law: str) -> None:
    try:
        run_law(Subject(kind, _config(kind, name)), law)
    except NotApplicableError as reason:
        pytest.skip(str(reason))


def _variants() -> list[tuple[str, str, str, ComponentConfig]]:
    found = []
    for kind in ("mixers", "channel_mixers", "blocks", "stems"):
        for name, config_cls in active()[kind].configs().items():
            found += [
                (kind, name, option, config) for option, config in option_variants(config_cls.tiny())
                if option not in KERNELS_BY_NAME
                and not (kind == "mixers" and option.startswith("position-") and name not in POSITIONS_OF)
            ]
    return found


VARIANTS = _variants()


def test_layouts_of_variants_have_pads_wherever_they_can_be() -> None:
    rows = [row for name in LAYOUTS_OF_VARIANTS for row in laws_segments.LAYOUTS[name] if len(row) > 1]
    for kind in (r"0+[1-9]", r".*[1-9]0+[1-9]", r".*[1-9]0+$", r"0+$"):
        assert any(re.match(kind, row) for row in rows), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "option", "config"), VARIANTS, ids=[f"{k}-{n}-{o}" for k, n, o, _ in VARIANTS]
)
def test_one_option_away_from_its_default(
    kind: str, name: str, option: str, config: ComponentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laws_segments, "LAYOUTS", {key: laws_segments.LAYOUTS[key] for key in LAYOUTS_OF_VARIANTS})
    monkeypatch.setattr(laws_time, "CUTS", CUTS_OF_VARIANTS)
    try:
        Subject(kind, config).build_plain()
    except (ConfigError, KernelError) as error:
        pytest.skip(f"cannot be built with {option} alone: {error}")
    wanted = LAWS_OF_STARTS if option in STARTS else LAWS_OF_VARIANTS
    laws = [law for law in wanted if law in laws_for(kind) and NOT_OF.get((name, option)) != law]
    failed = [r for r in run_checks(kind, config, laws) if not r.ok]
    assert not failed, "\n".join(f"{r.law}: {r.message}" for r in failed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "mamba2"])
def test_inductor_agrees_with_eager(name: str) -> None:
    check_compile(Subject("mixers", active()["mixers"].get(name).tiny()), backend="inductor")


KERNELS = [kernel for op in active().kernels.ops() for kernel in active().kernels.of(op)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op}-{k.name}")
def test_kernel(kernel: Kernel) -> None:
    try:
        check_kernel(kernel)
    except NotApplicableError as reason:
        pytest.skip(str(reason))


def test_nothing_failed_to_register() -> None:
    assert active().failures == {}
