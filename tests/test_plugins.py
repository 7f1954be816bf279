"""Plugins: every hook is used, and a plugin that fails is named, adds nothing, and leaves the rest working."""

import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import pytest

import hybridtf
from hybridtf import core, hookspecs, plugins
from hybridtf.core import BuildContext, Kernel, Norm, NormConfig, PluginError, Preset, TaskConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.plugins import PluginManager, hook_names, load_registries, make_plugin_manager


class GoodConfig(NormConfig):
    type: Literal["good"] = "good"
    factor: float = 1.0

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        raise NotImplementedError


class OtherConfig(GoodConfig):
    type: Literal["other"] = "other"  # type: ignore[assignment]


def load() -> Callable[..., Any]:
    raise NotImplementedError


KERNEL = Kernel("ssd", "mine", 5, core.always, load)


def plugin(**hooks: Any) -> types.ModuleType:
    """A module whose ``hybridtf_<kind>`` hooks return what is given, or call it."""
    module = types.ModuleType("some_plugin")

    def hook(value: Any) -> Callable[[], Any]:
        return hookimpl(value if inspect.isfunction(value) else (lambda: value))

    for kind, value in hooks.items():
        setattr(module, f"hybridtf_{kind}", hook(value))
    return module


def registries_of(*modules: tuple[str, Any], strict: bool = False) -> core.Registries:
    manager = PluginManager()
    for name, module in modules:
        manager.register(module, name)
    return load_registries(manager, strict=strict)


GOOD = ("good", plugin(norms=[GoodConfig]))


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_hook_and_the_other_way_round() -> None:
    assert set(hook_names()) == {f"hybridtf_{kind}" for kind in (*core.KINDS, "kernels", "op_cases", "recipes")}
    assert set(plugins.BASES) == set(core.KINDS)
    assert {base.kind for base in plugins.BASES.values()} == set(core.KINDS)


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_is_documented(name: str) -> None:
    hook = getattr(hookspecs, name)
    assert len(inspect.getdoc(hook) or "") > 30
    assert not inspect.signature(hook).parameters
    assert not hook()


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_is_used_by_a_built_in(name: str) -> None:
    manager = make_plugin_manager(autoload=False)
    assert [impl.plugin_name for impl in getattr(manager.hook, name).get_hookimpls()]


def test_every_hook_reaches_its_registry(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    entries: dict[str, Any] = {"kernels": [KERNEL], "recipes": [tmp_path]}
    for kind, base in plugins.BASES.items():
        method = "load" if kind == "tasks" else "build"
        body = {
            "__annotations__": {"type": Literal["thing"]}, "type": "thing", "__module__": __name__,
            method: lambda self, ctx: None, "tiny": classmethod(lambda cls: cls()),
        }
        if kind == "models":
            body["stacks"] = lambda self: ()
        entries[kind] = [type("ThingConfig", (base,), body), Preset("preset", "thing")]
    registries = registries_of(("all", plugin(**entries)))
    assert registries.failures == {}
    for kind in core.KINDS:
        assert registries[kind].names() == ["preset", "thing"]
        assert registries[kind].origin("thing") == "all"
    assert registries.kernels.get("ssd", "mine") is KERNEL
    assert registries.recipe_folders == [tmp_path]


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_built_ins_come_through_the_same_hooks() -> None:
    registries = load_registries(make_plugin_manager(autoload=False), strict=True)
    assert registries.failures == {}
    assert registries.plugins == {"hybridtf": hybridtf.__version__}
    assert registries["mixers"].origin("attention") == "hybridtf"
    assert {"attention", "mamba2"} <= set(registries["mixers"])


def test_managers_are_fresh() -> None:
    assert make_plugin_manager(autoload=False) is not make_plugin_manager(autoload=False)


def test_the_order_of_plugins_does_not_matter() -> None:
    needs = ("needs", plugin(norms=[Preset("double", "good", {"factor": 2.0})]))
    for order in ([needs, GOOD], [GOOD, needs]):
        registries = registries_of(*order)
        assert registries.failures == {}
        assert registries["norms"].names() == ["double", "good"]


def test_versions() -> None:
    module = plugin(norms=[GoodConfig])
    module.__version__ = "3.1"
    registries = registries_of(("a", module), ("b", plugin(norms=[OtherConfig])))
    assert registries.plugins == {"a": "3.1", "b": "local"}


def test_a_failing_built_in_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hybridtf.broken_room", plugin(norms=[int]))
    monkeypatch.setattr(plugins, "BUILT_INS", ("hybridtf.nn", "hybridtf.broken_room"))
    with pytest.raises(PluginError) as caught:
        load_registries(make_plugin_manager(autoload=False))
    assert str(caught.value) == "built-in hybridtf.broken_room: norms: int is not a subclass of NormConfig"
    monkeypatch.setattr(plugins, "BUILT_INS", ("hybridtf.no_such_room",))
    with pytest.raises(ModuleNotFoundError):
        make_plugin_manager(autoload=False)


# -- what is refused ---------------------------------------------------------------------------------------------------


class NoType(NormConfig):
    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        raise NotImplementedError


class StrType(GoodConfig):
    type: str = "good"  # type: ignore[assignment]


class TwoTypes(GoodConfig):
    type: Literal["a", "b"] = "a"  # type: ignore[assignment]


class NoDefault(GoodConfig):
    type: Literal["a"]  # type: ignore[assignment]


class BadName(GoodConfig):
    type: Literal["has space"] = "has space"  # type: ignore[assignment]


class NoBuild(NormConfig):
    type: Literal["nobuild"] = "nobuild"

    @classmethod
    def tiny(cls) -> Self:
        return cls()


class NoTiny(NormConfig):
    type: Literal["notiny"] = "notiny"

    def build(self, ctx: BuildContext) -> Norm:
        raise NotImplementedError


class NoLoad(TaskConfig):
    type: Literal["noload"] = "noload"

    @classmethod
    def tiny(cls) -> Self:
        return cls()


class NoStacks(core.ModelConfig):
    type: Literal["nostacks"] = "nostacks"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Any:
        raise NotImplementedError


class Thawed(GoodConfig):
    model_config = pydantic.ConfigDict(frozen=False)


class Lenient(GoodConfig):
    model_config = pydantic.ConfigDict(extra="ignore")


class Meaningful(GoodConfig):
    limit: int | None = 3


def raises(error: BaseException) -> Callable[[], Any]:
    def hook() -> Any:
        raise error

    return hook


TYPE_HELP = "needs a field  type: Literal['name'] = 'name'"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norms": [int]}, "norms: int is not a subclass of NormConfig"),
    ({"norms": [GoodConfig()]}, f"norms: {GoodConfig()!r} is not a subclass of NormConfig"),
    ({"mixers": [GoodConfig]}, "mixers: GoodConfig is not a subclass of SequenceMixerConfig"),
    ({"norms": [NoType]}, f"norms: NoType {TYPE_HELP}"),
    ({"norms": [StrType]}, f"norms: StrType {TYPE_HELP}"),
    ({"norms": [TwoTypes]}, f"norms: TwoTypes {TYPE_HELP}"),
    ({"norms": [NoDefault]}, f"norms: NoDefault {TYPE_HELP}"),
    ({"norms": [BadName]},
     "norms: BadName has type 'has space', which is no name: a letter, then letters, digits, _ or -"),
    ({"norms": [NoBuild]}, "norms: NoBuild has no build()"),
    ({"norms": [NoTiny]}, "norms: NoTiny has no tiny()"),
    ({"tasks": [NoLoad]}, "tasks: NoLoad has no load()"),
    ({"models": [NoStacks]}, "models: NoStacks does not define stacks"),
    ({"norms": [Thawed]}, "norms: Thawed must keep frozen = True in its model_config"),
    ({"norms": [Lenient]}, "norms: Lenient must keep extra = 'forbid' in its model_config"),
    ({"norms": [Meaningful]},
     "norms: Meaningful gives option 'limit' a default and permits None, which a recipe cannot say: TOML has no null"),
    ({"norms": None}, "hybridtf_norms must return a list or a tuple, not NoneType"),
    ({"norms": OtherConfig}, "hybridtf_norms must return a list or a tuple, not ModelMetaclass"),
    ({"norms": raises(KeyError("x"))}, "hybridtf_norms raised KeyError: 'x' (test_plugins.py, line "),
    ({"norms": raises(SystemExit(3))}, "hybridtf_norms raised SystemExit: 3 (test_plugins.py, line "),
    ({"norms": [GoodConfig]}, "norms: the name 'good' is already registered by good"),
    ({"norms": [OtherConfig, OtherConfig]}, "norms: the name 'other' is already registered by bad"),
    ({"norms": [OtherConfig, Preset("good", "other")]}, "norms: the name 'good' is already registered by good"),
    ({"norms": [Preset("new", "unknown")]}, "norms: preset 'new' stands for 'unknown', which is not registered"),
    ({"norms": [Preset("new", "good", {"x": 1})]}, "norms: preset 'new' names 'x', which is no option of 'good'"),
    ({"kernels": [KERNEL, KERNEL]}, "op 'ssd' already has a kernel named 'mine'"),
    ({"kernels": ["fast"]}, "kernels: 'fast' is not a hybridtf.core.Kernel"),
    ({"kernels": [Kernel("ssd", "x", 1, None, load)]},  # type: ignore[arg-type]
     "kernels: why_not and load of ssd/x must be functions"),
    ({"recipes": ["/tmp"]}, "recipes: '/tmp' is not a folder given as a pathlib.Path"),
    ({"recipes": [Path("/no/such/folder")]}, "recipes: '/no/such/folder' is not a folder given as a pathlib.Path"),
    ({"mixerz": []},
     f"no hook named 'hybridtf_mixerz'. Did you mean 'hybridtf_mixers'? Known: {', '.join(hook_names())}"),
    ({}, "has no hooks; mark a function such as hybridtf_mixers with @hybridtf.hookimpl"),
]


@pytest.mark.parametrize(("hooks", "reason"), REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_a_bad_plugin_is_named_and_the_rest_works(hooks: dict[str, Any], reason: str) -> None:
    # Beside the bad entry, good ones that must not stay behind.
    hooks = {**hooks, "stems": []} if hooks else hooks
    registries = registries_of(GOOD, ("bad", plugin(**hooks)))
    assert list(registries.failures) == ["bad"]
    assert registries.failures["bad"].startswith(reason)
    assert reason.endswith("line ") or registries.failures["bad"] == reason
    assert registries.plugins == {"good": "local"}
    assert registries["norms"].names() == ["good"]
    assert registries.kernels.ops() == ()
    with pytest.raises(PluginError) as caught:
        registries_of(GOOD, ("bad", plugin(**hooks)), strict=True)
    assert str(caught.value) == f"plugin 'bad': {registries.failures['bad']}"


def test_what_was_half_registered_is_rolled_back(tmp_path: Path) -> None:
    bad = plugin(kernels=[KERNEL], recipes=[tmp_path], norms=[OtherConfig, Preset("p", "nothing")])
    registries = registries_of(("bad", bad), GOOD)
    assert list(registries.failures) == ["bad"]
    assert registries["norms"].names() == ["good"]
    assert registries.kernels.ops() == ()
    assert registries.recipe_folders == []


def test_a_preset_on_a_plugin_that_failed_fails_too() -> None:
    base = ("base", plugin(norms=[OtherConfig], stems=[int]))
    user = ("user", plugin(norms=[Preset("twice", "other", {"factor": 2.0})]))
    registries = registries_of(base, user, GOOD)
    assert registries.failures == {
        "base": "stems: int is not a subclass of StemConfig",
        "user": "norms: preset 'twice' stands for 'other', which is not registered",
    }
    assert registries["norms"].names() == ["good"]


def test_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "demo").mkdir(parents=True)
        (tmp_path / folder / "demo" / "x.toml").write_text("")
    registries = registries_of(("a", plugin(recipes=[tmp_path / "a"])), ("b", plugin(recipes=[tmp_path / "b"])))
    assert registries.failures == {"b": "recipes: the name 'demo/x' is already registered by a"}


def test_a_hook_without_its_mark_is_reported() -> None:
    module = plugin(norms=[GoodConfig])
    module.hybridtf_mixers = load  # type: ignore[attr-defined]
    assert registries_of(("bad", module)).failures == {
        "bad": "hybridtf_mixers is not marked with @hybridtf.hookimpl, so it is never called"
    }


def test_wrappers_are_refused() -> None:
    module = types.ModuleType("wrapping")

    @hookimpl(wrapper=True)
    def hybridtf_norms() -> Any:
        return (yield)

    module.hybridtf_norms = hybridtf_norms  # type: ignore[attr-defined]
    assert registries_of(("bad", module)).failures == {
        "bad": "hybridtf_norms is a wrapper; the hooks of hybridtf only collect"
    }


def test_a_plugin_may_be_an_object() -> None:
    class Plugin:
        @hookimpl
        def hybridtf_norms(self) -> Sequence[type[NormConfig]]:
            return [GoodConfig]

    assert registries_of(("object", Plugin()))["norms"].names() == ["good"]


# -- installed plugins -------------------------------------------------------------------------------------------------


def install(site: Path, dist: str, code: str | None, *, version: str = "1.0", points: str | None = None) -> None:
    """Lay a distribution out as an installer would: a module, its metadata, its entry points."""
    module = dist.replace("-", "_")
    info = site / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[hybridtf]\n{points or f'{dist} = {module}'}\n")
    if code is not None:
        (site / f"{module}.py").write_text(textwrap.dedent(code))


NORM = """
    from typing import Literal
    from hybridtf.core import NormConfig
    from hybridtf.hookspecs import hookimpl

    class {name}Config(NormConfig):
        type: Literal["{name}"] = "{name}"

        @classmethod
        def tiny(cls):
            return cls()

        def build(self, ctx):
            raise NotImplementedError

    @hookimpl
    def hybridtf_norms():
        return [{name}Config]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Only what a test installs: whatever plugins this machine has stay out of the picture.
    bare = [entry for entry in sys.path if not list(Path(entry or ".").glob("*.dist-info"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *bare])
    monkeypatch.delenv(plugins.DISABLE, raising=False)
    before = set(sys.modules)
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith("htf_"):
            del sys.modules[name]


def installed() -> core.Registries:
    return load_registries(make_plugin_manager(autoload=True))


def test_three_plugins_of_which_one_works(site: Path) -> None:
    install(site, "htf-good", NORM.format(name="fine"), version="2.5")
    install(site, "htf-import", "import no_such_package")
    broken = "    @hookimpl\n    def hybridtf_mixers():\n        raise OSError('gone')\n"
    install(site, "htf-half", NORM.format(name="half") + broken)
    registries = installed()
    assert registries.failures == {
        "htf-import": (
            "could not be imported from 'htf_import': ModuleNotFoundError: No module named 'no_such_package' "
            "(htf_import.py, line 1)"
        ),
        "htf-half": f"hybridtf_mixers raised OSError: gone (htf_half.py, line {_line(site / 'htf_half.py', 'gone')})",
    }
    assert registries.plugins["htf-good"] == "2.5"
    assert "fine" in registries["norms"]
    assert "half" not in registries["norms"]
    assert registries["norms"].make({"type": "fine"}).type_name() == "fine"
    with pytest.raises(PluginError, match=r"plugin 'htf-import': could not be imported .*; plugin 'htf-half': "):
        load_registries(make_plugin_manager(autoload=True), strict=True)


def test_a_reason_of_several_lines_is_told_on_one(site: Path) -> None:
    install(site, "htf-lines", "raise ImportError('one\\n  two')")
    install(site, "htf-hook", """
        from hybridtf.hookspecs import hookimpl

        @hookimpl
        def hybridtf_norms():
            raise OSError("one\\ntwo")
    """)
    assert installed().failures == {
        "htf-lines": "could not be imported from 'htf_lines': ImportError: one two (htf_lines.py, line 1)",
        "htf-hook": f"hybridtf_norms raised OSError: one two (htf_hook.py, line {_line(site / 'htf_hook.py', 'one')})",
    }


def _line(file: Path, text: str) -> int:
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_autoload_can_be_switched_off(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "htf-off", NORM.format(name="off"))
    monkeypatch.setenv(plugins.DISABLE, "1")
    assert "off" not in load_registries()["norms"]
    assert "off" in installed()["norms"]
    monkeypatch.setenv(plugins.DISABLE, "0")
    assert "off" in load_registries()["norms"]
    assert "off" not in load_registries(make_plugin_manager(autoload=False))["norms"]


def test_an_entry_point_that_points_at_nothing(site: Path) -> None:
    install(site, "htf-gone", None)
    install(site, "htf-attr", NORM.format(name="attr"), points="htf-attr = htf_attr:plugin")
    failures = installed().failures
    assert failures["htf-gone"] == (
        "could not be imported from 'htf_gone': ModuleNotFoundError: No module named 'htf_gone'"
    )
    assert failures["htf-attr"].startswith(
        "could not be imported from 'htf_attr:plugin': AttributeError: module 'htf_attr' has no attribute 'plugin'"
    )


def test_a_plugin_that_exits_when_imported(site: Path) -> None:
    install(site, "htf-exit", "import sys\nsys.exit(4)\n")
    assert installed().failures == {
        "htf-exit": "could not be imported from 'htf_exit': SystemExit: 4 (htf_exit.py, line 2)"
    }


def test_one_distribution_installed_twice(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = site / "first", site / "second"
    install(first, "htf-twice", NORM.format(name="twice"), version="2.0")
    install(second, "htf-twice", NORM.format(name="twice"), version="1.0")
    monkeypatch.setattr(sys, "path", [str(first), str(second), *sys.path])
    registries = installed()
    assert registries.plugins["htf-twice"] == "2.0"
    assert registries.failures == {
        f"htf-twice 1.0 ({second})": f"htf-twice is installed twice; version 2.0 in {first} is used, not this one"
    }


def test_two_distributions_with_one_plugin_name(site: Path) -> None:
    install(site, "htf-a", NORM.format(name="aaa"), points="same = htf_a")
    install(site, "htf-b", NORM.format(name="bbb"), points="same = htf_b\nother = htf_b")
    registries = installed()
    assert registries.failures == {"same (htf-b 1.0)": "the plugin name 'same' is taken by htf-a 1.0"}
    assert registries["norms"].origin("bbb") == "other"


def test_one_module_under_two_names(site: Path) -> None:
    install(site, "htf-two", NORM.format(name="two"), points="one = htf_two\ntwo = htf_two")
    registries = installed()
    assert list(registries.failures) == ["two"]
    assert "already registered under a different name" in registries.failures["two"]


def test_a_module_without_hooks(site: Path) -> None:
    install(site, "htf-empty", "x = 1")
    assert installed().failures == {
        "htf-empty": "has no hooks; mark a function such as hybridtf_mixers with @hybridtf.hookimpl"
    }


def test_a_hook_with_arguments_it_does_not_get(site: Path) -> None:
    install(site, "htf-args", """
        from hybridtf.hookspecs import hookimpl

        @hookimpl
        def hybridtf_norms(config):
            return []
    """)
    assert "Argument(s) {'config'} are declared in the hookimpl but can not be found in the hookspec" in (
        installed().failures["htf-args"]
    )


def test_a_plugin_that_looks_components_up_while_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "htf-early", "from hybridtf.core import active\nMIXERS = active()['mixers'].names()\n")
    monkeypatch.setattr(core.registry, "_default", None)
    reason = core.active().failures["htf-early"]
    assert "PluginError: a component was looked up while plugins are still being loaded" in reason
    assert "attention" in core.active()["mixers"]
