"""Claims: verdicts, and numbers out of records."""

from __future__ import annotations

import pytest

from hybridtf.core import ConfigError
from hybridtf.studies import Finding, Measures, claim, difference, highest, lowest
from hybridtf.studies.present import finding_markdown
from tests.studies import study_cases as cases


def test_a_claim_is_shown_where_every_seed_keeps_its_bound() -> None:
    shown = claim("it holds", {0: 0.9, 1: 0.95, 2: 1.0}, at_least=0.9)
    assert (shown.verdict, shown.expected) == ("shown", "accuracy at least 0.9")
    assert shown.mean == pytest.approx(0.95)
    half = 4.302652729911 * 0.05 / 3**0.5
    assert shown.interval == pytest.approx((0.95 - half, 1.0))  # no share is above 1
    more = claim("more", {0: 0.9, 1: 0.95, 2: 1.0}, at_least=0.9, what="more")
    assert more.interval == pytest.approx((0.95 - half, 0.95 + half))
    assert claim("it holds", {0: 0.89, 1: 1.0, 2: 1.0}, at_least=0.9).verdict == "not shown"
    assert claim("it falls", {0: 0.5, 1: 0.61}, at_most=0.6).verdict == "not shown"
    assert claim("between", {0: 0.5}, at_least=0.4, at_most=0.6).verdict == "shown"


def test_what_a_seed_lacks_is_not_measured() -> None:
    assert claim("it holds", {0: 1.0, 1: None}, at_least=0.9).verdict == "not measured"
    nothing = claim("it holds", {}, at_least=0.9)
    assert (nothing.verdict, nothing.mean, nothing.interval) == ("not measured", None, None)


def test_a_claim_waits_for_the_one_that_it_needs() -> None:
    learnt = claim("it learns", {0: 0.5}, at_least=0.9)
    assert claim("it falls", {0: 0.1}, at_most=0.3, provided=learnt).verdict == "not measured"
    assert claim("it falls", {0: 0.1}, at_most=0.3, provided=claim("it learns", {0: 1.0}, at_least=0.9)).verdict == "shown"


def test_a_claim_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="'it is nice' has no bound"):
        claim("it is nice", {0: 1.0})


def test_measures_take_the_later_record_and_know_missing_seeds() -> None:
    records = [
        cases.quality("a", {"64 tokens": 0.5}), cases.quality("a", {"64 tokens": 0.75}),
        cases.quality("b", {"64 tokens": 0.5}, seed=1), cases.model("a", 4096),
    ]
    measures = Measures(records)
    assert measures.quality("a", "64 tokens") == {0: 0.75, 1: None}
    assert measures.quality("a") == {0: 0.75, 1: None}
    assert measures.quality("a", "65 tokens") == measures.quality("c") == {0: None, 1: None}
    assert measures.state_bytes("a", 1024) == 4096
    assert measures.state_bytes("a", 2048) is measures.state_bytes("b", 1024) is None


def test_series_combine_seed_by_seed() -> None:
    one, other = {0: 1.0, 1: 0.25}, {0: 0.5, 1: None}
    assert difference(one, other) == {0: 0.5, 1: None}
    assert lowest(one, {0: 0.5, 1: 0.75}) == {0: 0.5, 1: 0.25}
    assert highest(one, {0: 0.5, 1: 0.75}) == {0: 1.0, 1: 0.75}


def test_the_page_has_every_claim_and_every_group() -> None:
    class Named:
        title, question = "A title", "A question?"

    records = [*cases.over_seeds("a", {"64 tokens": 0.5, "128 tokens": 0.25}), cases.model("a", 4096)]
    finding = Finding((claim("a | b", {0: 0.5}, at_least=0.9),), ("a note",))
    text = finding_markdown(Named(), records, finding)
    assert "| a \\| b | accuracy at least 0.9 | 0.500 |  | 0.500 | **not shown** |" in text
    assert "| drawn | 64 tokens | 128 tokens | steps | seconds | parameters | state bytes at 1,024 |" in text
    assert "| a | 0.500 | 0.250 | not measured | not measured | 1,000 | 4,096 |" in text
    assert text.endswith("- a note\n")
    of_other_sizes = finding_markdown(Named(), [*records, *cases.over_seeds("b", {"12 tokens": 0.75})], finding)
    assert "| drawn | 12 tokens | steps | seconds | parameters | state bytes at 1,024 |" in of_other_sizes
    assert "| a | 0.500 | 0.250 | not measured | not measured | 1,000 | 4,096 |" in of_other_sizes
    assert "say nothing" in finding_markdown(Named(), records, finding, smoke=True)
