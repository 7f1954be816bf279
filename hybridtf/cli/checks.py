"""``check``: recipes validated and built without memory, or the laws of the contract over a plugin's components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json, Set
from hybridtf.cli.output import add_row, counted, make_table, print_json, print_table, print_text, say, say_error
from hybridtf.cli.sources import name_of, read_recipe, registries

if TYPE_CHECKING:
    from hybridtf.core import ComponentConfig, Kernel, Registries
    from hybridtf.testing import CheckResult


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("check")(check)


def check(
    recipes: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE...]", help="Recipe files or names.")] = None,
    plugin: Annotated[
        str | None,
        typer.Option(
            "--plugin",
            metavar="NAME",
            help="Run the laws over all that this plugin registered (hybridtf: the built-ins).",
        ),
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            metavar="KIND.NAME",
            help="Run the laws over this component, such as mixers.mamba2. May be repeated.",
        ),
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Check recipes, or the contract of components.

    Recipes are validated, and built without memory. Components are held to every law of their contract:
    a table of what is kept, then what is broken, with the smallest case found, and what cannot be.
    Exit code 2 for a wrong recipe, 1 for a broken law.
    """
    if sum(map(bool, (recipes, plugin, component))) != 1:
        raise typer.BadParameter("give recipes, or --plugin NAME, or --component KIND.NAME", param_hint="RECIPE")
    found = registries()
    if recipes:
        _check_recipes(recipes, set_, json)
        return
    kernels: list[Kernel] = []
    if plugin:
        components, kernels = _of_plugin(found, plugin)
    else:
        components = [_component(found, word) for word in component or ()]
    _check_laws(components, kernels, json)


# -- recipes -----------------------------------------------------------------------------------------------------------


def _check_recipes(sources: Sequence[str], overrides: Sequence[str] | None, json: bool) -> None:
    """Every recipe, though one before it is wrong."""
    import torch

    from hybridtf.core import BuildContext, HybridTFError

    results: list[dict[str, Any]] = []
    for source in sources:
        try:
            model = read_recipe(source, overrides).model.build(BuildContext(d_model=0, device=torch.device("meta")))
        except HybridTFError as error:
            faults = getattr(error, "faults", None) or [("", str(error))]
            listed = [{"path": path, "message": text} for path, text in faults]
            results.append({"recipe": source, "ok": False, "faults": listed})
            named = getattr(error, "source", "") or source in str(error)
            say_error(str(error) if named else f"{source}: {error}")
            continue
        n_params = sum(param.numel() for param in model.parameters())
        patterns = [stack.pattern for stack in model.config.stacks()]
        results.append({"recipe": source, "ok": True, "faults": [], "n_params": n_params, "patterns": patterns})
        if not json:
            print_text(f"{name_of(source)}: ok, {counted(n_params, 'parameter')}, {' | '.join(patterns)}")
    if json:
        print_json(results)
    if not all(result["ok"] for result in results):
        raise typer.Exit(2)


# -- laws --------------------------------------------------------------------------------------------------------------

Component = tuple[str, str]
"""Kind and name."""


def _of_plugin(found: Registries, plugin: str) -> tuple[list[Component], list[Kernel]]:
    """What a plugin registered. Raises :class:`PluginError` for one that is unknown or was not loaded."""
    from hybridtf.core import PluginError, known_names

    if plugin in found.failures:
        raise PluginError(f"plugin {plugin!r} was not loaded: {found.failures[plugin]}")
    if plugin not in found.plugins:
        raise PluginError(f"no plugin named {plugin!r}. {known_names(plugin, found.plugins)}")
    components = [
        (kind, name) for kind, registry in found.by_kind.items() for name in registry.names() if registry.origin(name) == plugin
    ]
    return components, found.kernels_of(plugin)


def _component(found: Registries, word: str) -> Component:
    from hybridtf.core import ConfigError

    kind, dot, name = word.partition(".")
    if not dot:
        raise ConfigError(f"--component {word}: must be KIND.NAME, such as mixers.mamba2")
    found[kind].get(name)
    return kind, name


def _check_laws(components: Sequence[Component], kernels: Sequence[Kernel], json: bool) -> None:
    """A table of components by laws, then what is broken and what cannot be; exit code 1 when a law is broken."""
    from hybridtf.testing.smallest import can_shrink

    results = []
    for component, found in groupby(_results(components, kernels), lambda result: result.component):
        of_one = list(found)
        results += of_one
        broken, seconds = sum(not result.ok for result in of_one), sum(result.seconds for result in of_one)
        say(f"{component}: {counted(len(of_one), 'law')}, {f'{broken} BROKEN' if broken else 'none broken'}, {seconds:.1f} s")
    if json:
        print_json([vars(result) for result in results])
    else:
        _print_laws(results)
    failed = sum(not result.ok for result in results)
    skipped = sum(result.skipped for result in results)
    say(f"{counted(len(results), 'check')}, {failed} failed, {skipped} with nothing to say")
    if failed and not can_shrink():
        say("the smallest case that breaks a law is looked for where hypothesis is installed")
    if failed:
        raise typer.Exit(1)


MARKS = {"+": "kept", "F": "BROKEN", "c": "declared: cannot, and does not", ".": "nothing to say"}


def _mark(result: CheckResult) -> str:
    if not result.ok:
        return "F"
    return "c" if result.cannot else "." if result.skipped else "+"


def _print_laws(results: Sequence[CheckResult]) -> None:
    laws = list(dict.fromkeys(result.law for result in results))
    table = make_table("component", *("\n".join(law) for law in laws))
    for component, found in groupby(results, lambda result: result.component):
        marks = {result.law: _mark(result) for result in found}
        add_row(table, component, *(marks.get(law, "") for law in laws))
    print_table(table)
    print_text("\n" + "   ".join(f"{mark} {word}" for mark, word in MARKS.items()))
    for title, chosen in (
        ("broken", [r for r in results if not r.ok]), ("cannot, as declared", [r for r in results if r.cannot]),
    ):
        if chosen:
            print_text(f"\n{title}")
        for result in chosen:
            print_text(f"  {result.component} {result.law}: {result.message}")
            if result.smallest:
                print_text(f"      smallest case found: {result.smallest}")


def _results(components: Sequence[Component], kernels: Sequence[Kernel]) -> Iterator[CheckResult]:
    from hybridtf.core.origins import cause
    from hybridtf.testing import CheckResult, run_checks
    from hybridtf.testing.run import PLUGIN_FAULTS

    for kind, name in components:
        try:
            config = _config(kind, name)
        except PLUGIN_FAULTS as error:
            yield CheckResult(f"{kind}.{name}", "tiny", False, cause(error), 0.0)
            continue
        for result in run_checks(kind, config, shrink=True):
            yield _renamed(result, kind, name)
    for kernel in kernels:
        yield _kernel_result(kernel)


def _config(kind: str, name: str) -> ComponentConfig:
    from hybridtf.core import active
    from hybridtf.testing import preset_config

    registry = active()[kind]
    return preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()


def _renamed(result: CheckResult, kind: str, name: str) -> CheckResult:
    """A preset is checked as its base type, and reported under its own name."""
    from dataclasses import replace

    return replace(result, component=f"{kind}.{name}")


def _kernel_result(kernel: Kernel) -> CheckResult:
    import time

    from hybridtf.testing import CheckResult, NotApplicableError, check_kernel
    from hybridtf.testing.laws_kernel import smallest_call
    from hybridtf.testing.run import PLUGIN_FAULTS

    name, started = f"kernels.{kernel.op}/{kernel.name}", time.perf_counter()
    ok, skipped, message, smallest = True, False, "", ""
    try:
        check_kernel(kernel)
    except NotApplicableError as reason:
        skipped, message = True, str(reason)
    except PLUGIN_FAULTS as error:  # a broken law is one of them
        ok, message, smallest = False, str(error), smallest_call(kernel, PLUGIN_FAULTS)
    return CheckResult(name, "kernel", ok, message, time.perf_counter() - started, skipped, smallest=smallest)
