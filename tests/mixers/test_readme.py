"""The room's table names what is registered, with its state and its ops; and every mixer says in a line what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybridtf.mixers
from hybridtf.cli.catalogue import one_line
from hybridtf.core import active
from hybridtf.core.registry import BUILT_IN
from hybridtf.testing import mixer_facts

README = Path(hybridtf.mixers.__file__).with_name("README.md").read_text(encoding="utf-8")
ROWS = {
    name: [cell.strip() for cell in line.strip("| ").split("|")]
    for line in README.partition("## To write one")[0].splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`(\w+)`", line.split("|")[1].split("(")[0])
}
MIXERS = active()["mixers"]
NAMES = [name for name in MIXERS.names() if MIXERS.origin(name) == BUILT_IN]


def test_every_mixer_has_a_row_and_every_row_a_mixer() -> None:
    assert sorted(ROWS) == sorted(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MIXERS.presets()])
def test_a_row_is_true(name: str) -> None:
    config = MIXERS.get(name)
    says = one_line(config)
    assert len(says.split()) > 4
    assert says.endswith(".")
    assert ":class:" not in says
    if config.combinator:
        return
    facts = mixer_facts(config.tiny())
    _, state, time, ops, proof = ROWS[name]
    assert state.startswith(facts.state)
    assert set(facts.ops) - {"short_conv"} == set(re.findall(r"`(\w+)`", ops)) - {"short_conv"}
    assert ("²" in time.partition(" ")[0] or "^" in time) == (facts.time_exponent > 1)
    assert proof.partition(" ")[0].strip(";") in ("layer", "loop", "numbers", "formula")
