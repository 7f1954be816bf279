"""Parameters of the recipes in ``recipes/published``, counted without memory: known numbers, and transformers' own count."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext
from hybridtf.cost import parameter_counts
from hybridtf.recipe import load_recipe, recipe_names

COUNTS = {
    "jamba": 51_570_323_328, "zamba2": 2_481_848_336, "falcon_h1": 8_514_961_408,
    "nemotron_h": 1_968_355_712, "granitemoehybrid": 38_601_064_448, "qwen3_next": 79_674_391_296,
    "kimi_linear": 49_133_074_464, "minimax": 47_373_946_880,
    "bamba": 9_992_765_440, "olmo_hybrid": 7_430_870_688, "recurrent_gemma": 2_010_263_040, "lfm2": 2_705_497_600,
    "mamba2": 7_285_403_648, "llama": 6_738_415_616,
}
MAMBA2_OF_1B = {
    "d_model": 2048, "pattern": "m*48", "vocab_size": 32000, "blocks.m.mixer.n_groups": 1, "blocks.m.mixer.n_heads": 64,
}


def total(name: str, **changes: object) -> int:
    recipe = load_recipe(f"published/{name}", [f"model.{path}={value}" for path, value in changes.items()])
    found = parameter_counts(recipe.model.build(BuildContext(d_model=0, device=torch.device("meta"))))["total"]
    assert isinstance(found, int)
    return found


def test_all_are_counted() -> None:
    assert {f"published/{name}" for name in COUNTS} == {name for name in recipe_names() if name.startswith("published/")}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name: str) -> None:
    assert total(name) == COUNTS[name]


def test_mamba2_of_the_papers_1_3b_size() -> None:
    """48 layers of width 2048 with one group, a vocabulary of 32,000 and a head of its own."""
    assert total("mamba2", **MAMBA2_OF_1B) == 1_371_839_488


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_as_transformers_counts_them(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.models.parity.published import DEFAULTS

    config = getattr(transformers, f"{DEFAULTS[name]}Config")()
    with torch.device("meta"):
        theirs = getattr(transformers, f"{DEFAULTS[name]}ForCausalLM")(config)
    assert sum(p.numel() for p in theirs.parameters()) == total(name)


@pytest.mark.parametrize("name", COUNTS)
def test_each_says_what_it_is_and_where_from(name: str) -> None:
    meta = load_recipe(f"published/{name}").meta
    assert meta.title
    assert "transformers 5.24" in meta.description
    assert meta.source.startswith("https://")
