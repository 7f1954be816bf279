"""The plugin as a whole: what it registers, and a model that uses it."""

import hybridtf_example
import torch

from hybridtf.core import kernels_used, using
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.recipe import parse_recipe

TABLE = {
    "model": {
        "type": "language_model", "vocab_size": 16, "d_model": 8, "pattern": "e m",
        "blocks": {
            "e": {"mixer": {"type": "gated_ema", "half_life": 4.0}},
            "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4, "conv_kernel": "windows"}},
        },
    },
    "task": {"type": "repeat"},
}


def test_it_registers_one_of_each() -> None:
    manager = make_plugin_manager(autoload=False)
    manager.register(hybridtf_example, "hybridtf-example")
    registries = load_registries(manager, strict=True)
    assert registries["mixers"].origin("gated_ema") == "hybridtf-example"
    assert registries["tasks"].origin("repeat") == "hybridtf-example"
    with using(registries):
        recipe = parse_recipe(TABLE)
        model = recipe.model.build()  # type: ignore[call-arg]
        used = {kernel for phases in kernels_used(model).values() for kernel in phases.values()}
        assert "windows" in used
        batch = next(recipe.task.load(0).train_batches(2, 24))  # type: ignore[union-attr, attr-defined]
        model.loss(batch.inputs, batch.targets, batch.segments).mean().backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
