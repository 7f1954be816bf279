"""Spaces: strict files, all stacks of them, and recipes out of stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridtf.core import RecipeError
from hybridtf.recipe import recipe_names
from hybridtf.search import load_space, parse_space, space_names
from tests.search.search_cases import table


def faults(**changes: Any) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        parse_space(table(**changes), "space.toml")
    return dict(caught.value.faults)


def test_all_stacks_of_a_space() -> None:
    space = parse_space(table())
    assert [stack.name for stack in space.stacks] == [
        "d d, d.mixer.allow_neg_eigval=true", "d d, d.mixer.allow_neg_eigval=false",
        "d a, d.mixer.allow_neg_eigval=true", "d a, d.mixer.allow_neg_eigval=false",
        "a d, d.mixer.allow_neg_eigval=true", "a d, d.mixer.allow_neg_eigval=false",
    ]
    both = parse_space(table(search={"slots": [["d", "a"], ["d", "a"]], "at_least": {"a": 1}}))
    assert [stack.name for stack in both.stacks] == ["d a", "a d", "a a"]


def test_a_stack_is_a_recipe_with_its_own_blocks_alone() -> None:
    space = parse_space(table(search={
        "slots": [["d", "a"], ["d", "a"]], "repeat": 2, "choices": {"d.mixer.n_heads": [1, 2]},
    }))
    stacks = {stack.name: space.recipe(stack).model for stack in space.stacks}
    assert (stacks["d a, d.mixer.n_heads=1"].pattern, stacks["a a"].pattern) == ("(d a)*2", "(a a)*2")
    assert list(stacks["a a"].blocks) == ["a"]
    assert [stacks[f"d d, d.mixer.n_heads={n}"].blocks["d"].mixer.n_heads for n in (1, 2)] == [1, 2]


def test_faults_of_a_space_have_places() -> None:
    assert "pattern" in faults(model={"pattern": "d a"})["model.pattern"]
    assert "leave it out" in faults(task={"type": "parity_small"})["task"]
    assert "no section [search]" in faults(search=None)["search"]
    assert "Did you mean 'slots'" in faults(search={"slot": [["d"]]})["search.slot"]
    found = faults(search={
        "slots": [["d", "q"], []], "at_most": {"z": 1}, "choices": {"d.mixer.n_heads": [1], "d": [1, 2]},
    })
    assert "no block 'q'" in found["search.slots[0]"]
    assert "must name blocks" in found["search.slots[1]"]
    assert "no block 'z'" in found["search.at_most.z"]
    assert "no slot takes this block" in found["model.blocks.a"]
    assert "two values that differ" in found['search.choices."d.mixer.n_heads"']
    assert "a block and an option of it" in found['search.choices."d"']
    assert "no stack keeps" in faults(search={"slots": [["d", "a"]], "at_least": {"a": 2}})["search"]
    assert "more than 100,000 stacks" in faults(search={"slots": [["d", "a"]] * 17})["search"]


def test_faults_of_a_block_are_said_before_any_trial() -> None:
    wrong = {"a": {"mixer": {"type": "full_attention", "n_haeds": 2}}, "d": {"mixer": {"type": "delta_net", "n_heads": 2}}}
    assert "n_heads" in faults(model={"blocks": wrong})["model.blocks.a.mixer.n_haeds"]


def test_installed_spaces_are_no_recipes_and_a_wrong_name_gives_the_nearest(tmp_path: Path) -> None:
    assert not set(space_names()) & set(recipe_names())
    for name in space_names():
        assert load_space(name).stacks
    with pytest.raises(RecipeError, match="no space named 'studies/nothing'"):
        load_space("studies/nothing")
