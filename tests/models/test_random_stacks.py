"""Any stack that the registries allow keeps its promises: random ones, each checked as a whole.

A stack is named by its seed; ``-k "stack[17]"`` runs one alone, and a failure prints the recipe as well.
"""

from __future__ import annotations

import functools

import pytest

from hybridtf.core import debug_states
from hybridtf.recipe import Recipe, to_toml
from tests.models.random_stack_checks import CHECKS
from tests.models.random_stacks import Drawn, combinators, drawable, kin, position_cards

SEEDS = range(24)
SLOW_SEEDS = range(24, 64)


draw = functools.cache(Drawn)


def check_stack(seed: int) -> None:
    drawn = draw(seed)
    model = drawn.build()
    declared = {law for module in model.modules() for law in getattr(module, "cannot", {})}
    failed = []
    for name, (check, laws) in CHECKS.items():
        if declared.isdisjoint(laws):
            try:
                with debug_states():  # a state that a call has consumed is poisoned
                    check(drawn, model)
            except Exception as error:  # whatever it is, the recipe that it came from has to be seen
                failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        pytest.fail("\n".join([f"the stack of seed {seed}", *failed, "", to_toml(Recipe(model=drawn.config))]), pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_stack(seed: int) -> None:
    check_stack(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_more_stacks(seed: int) -> None:
    check_stack(seed)


@pytest.mark.slow
def test_every_component_is_drawn() -> None:
    seen: dict[str, set[str]] = {}
    for seed in (*SEEDS, *SLOW_SEEDS):
        for kind, cards in draw(seed).cards.items():
            seen.setdefault(kind, set()).update(cards)
    for kind in ("mixers", "channel_mixers", "blocks", "norms", "stems", "heads"):
        assert seen[kind] == set(drawable(kind)), kind
    assert seen["positions"] == set(position_cards())
    assert seen["kin"] == set(kin()) != set()
    assert seen["combinators"] == set(combinators())
    assert seen["shared"] == {"plain", "adapters"}
    assert seen["heads tied"] == {"True", "False"}


def test_a_seed_is_one_stack() -> None:
    assert Drawn(5).config == Drawn(5).config != Drawn(6).config
