"""``pytest --pyargs hybridtf.testing``: the contract kit over what installed plugins register, a test a law."""

from __future__ import annotations

from typing import Any

from hybridtf.core import PluginError, active, known_names
from hybridtf.core.registry import BUILT_IN
from hybridtf.testing.errors import NotApplicableError
from hybridtf.testing.laws_config import preset_config
from hybridtf.testing.laws_kernel import check_kernel, smallest_call
from hybridtf.testing.run import PLUGIN_FAULTS, laws_for, run_law
from hybridtf.testing.smallest import smallest_case
from hybridtf.testing.subject import Subject


def plugins_of(asked: list[str]) -> list[str]:
    """The plugins to check: those asked for, or all that are installed. Raises :class:`PluginError` for one that is not."""
    found = active()
    for name in asked:
        if name in found.failures:
            raise PluginError(f"plugin {name!r} was not loaded: {found.failures[name]}")
        if name not in found.plugins:
            raise PluginError(f"no plugin named {name!r}. {known_names(name, found.plugins)}")
    return asked or [name for name in found.plugins if name != BUILT_IN]


def pytest_generate_tests(metafunc: Any) -> None:
    """A test for every law of every component, and for every kernel."""
    plugins = plugins_of(metafunc.config.getoption("--hybridtf-plugin"))
    if "law" in metafunc.fixturenames:
        cases = [
            (kind, name, law)
            for kind, registry in active().by_kind.items()
            for name in registry.names()
            if registry.origin(name) in plugins
            for law in laws_for(kind)
        ]
        metafunc.parametrize(("kind", "name", "law"), cases, ids=["-".join(case) for case in cases])
    elif "kernel" in metafunc.fixturenames:
        kernels = [kernel for plugin in plugins for kernel in active().kernels_of(plugin)]
        metafunc.parametrize("kernel", kernels, ids=[f"{kernel.op}-{kernel.name}" for kernel in kernels])


def test_law(kind: str, name: str, law: str) -> None:
    """One law on one component; a failure says the smallest case found."""
    import pytest

    registry = active()[kind]
    config = preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()
    subject = Subject(kind, config)
    try:
        run_law(subject, law)
    except NotApplicableError as reason:
        pytest.skip(str(reason))
    except PLUGIN_FAULTS as error:
        smallest = smallest_case(subject, law, PLUGIN_FAULTS)
        found = f"\nsmallest case found: {smallest}" if smallest else ""
        pytest.fail(f"{type(error).__name__}: {error}{found}", pytrace=False)


def test_kernel(kernel: Any) -> None:
    """One kernel against the reference of its op, on every registered case and through every mixer that uses it."""
    import pytest

    try:
        check_kernel(kernel)
    except NotApplicableError as reason:
        pytest.skip(str(reason))
    except PLUGIN_FAULTS as error:
        smallest = smallest_call(kernel, PLUGIN_FAULTS)
        found = f"\nsmallest case found: {smallest}" if smallest else ""
        pytest.fail(f"{error}{found}", pytrace=False)
