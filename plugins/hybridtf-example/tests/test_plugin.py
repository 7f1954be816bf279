"""The plugin as a whole: what it registers, and that the recipe beside this folder builds and learns with it."""

from pathlib import Path

import hybridtf_example

from hybridtf.core import kernels_used, using
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipe.toml"


def test_it_registers_one_of_each() -> None:
    manager = make_plugin_manager(autoload=False)
    manager.register(hybridtf_example, "hybridtf-example")
    registries = load_registries(manager, strict=True)
    assert registries["mixers"].origin("gated_ema") == "hybridtf-example"
    assert registries["tasks"].origin("repeat") == "hybridtf-example"
    assert [kernel.name for kernel in registries.kernels_of("hybridtf-example")] == ["windows"]


def test_the_recipe_uses_all_three() -> None:
    manager = make_plugin_manager(autoload=False)
    manager.register(hybridtf_example, "hybridtf-example")
    with using(load_registries(manager, strict=True)):
        recipe = load_recipe(RECIPE)
        model = recipe.model.build()  # type: ignore[call-arg]
        assert "windows" in {kernel for phases in kernels_used(model).values() for kernel in phases.values()}
        batch = next(recipe.task.load(0).train_batches(2, 24))  # type: ignore[union-attr, attr-defined]
        model.loss(batch.inputs, batch.targets, batch.segments).mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
