"""The studies that read text along documents: verdicts from hand-made records, and recipes equal where they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from hybridtf.bench import Subject
from hybridtf.bench.records import Record
from hybridtf.recipe import Recipe
from hybridtf.studies import find_study
from hybridtf.studies.present import finding_markdown
from tests.studies import study_cases as cases

FLAT = (2.2, 2.2, 2.2, 2.2, 2.2, 2.2)
BROKEN = (2.2, 2.5, 3.2, 4.0, 4.4, 4.7)


def verdicts(name: str, lines: Mapping[str, Sequence[float | None]]) -> list[str]:
    records = [cases.beyond(recipe, bits, seed=seed) for recipe, bits in lines.items() for seed in range(3)]
    return [claim.verdict for claim in find_study(name).finding(records).claims]


def test_text_positions_is_shown_and_not_shown() -> None:
    shown = {
        "rope": BROKEN, "rope_pi": (4.5, 4.5, 4.5, 4.6, 4.5, 4.5), "rope_ntk": (2.4, 2.5, 2.6, 3.0, 4.0, 4.6),
        "rope_yarn": (2.5, 2.7, 2.8, 3.2, 3.1, 3.9), "alibi": FLAT, "nope": (3.0, 3.0, 3.1, 3.3, 3.4, 3.5), "window": FLAT,
        "window_nope": FLAT,
    }
    assert verdicts("text_positions", shown) == ["shown"] * 11
    worse = (2.3, 2.3, 2.3, 2.3, 2.3, 2.4)
    unlike = {
        "rope": FLAT, "rope_pi": FLAT, "rope_ntk": FLAT, "rope_yarn": worse, "alibi": worse, "nope": FLAT, "window": worse,
        "window_nope": worse,
    }
    assert verdicts("text_positions", unlike) == ["shown"] + ["not shown"] * 10
    # Attention that has learnt nothing cannot be seen to break, nor to be helped.
    unlearnt = shown | {"rope": (4.0, 4.2, 5.0, 6.0, 6.0, 7.0)}
    assert verdicts("text_positions", unlearnt) == [
        "not shown", *["not measured"] * 5, *["shown"] * 4, "not measured",
    ]
    stopped = {name: (*bits[:5], None) for name, bits in shown.items()}
    assert verdicts("text_positions", stopped).count("not measured") == 6


def test_beyond_training_is_shown_and_not_shown() -> None:
    falling = (2.2, 2.15, 2.1, 2.1, 2.05, 2.05)
    shown = {"samba": falling, "griffin": falling, "rope_later": BROKEN, "rope_first": falling, "nope_later": falling}
    assert verdicts("beyond_training", shown) == ["shown"] * 8
    rising = (2.2, 2.25, 2.25, 2.3, 2.3, 2.3)
    unlike = {"samba": rising, "griffin": rising, "rope_later": rising, "rope_first": BROKEN, "nope_later": BROKEN}
    assert verdicts("beyond_training", unlike) == ["not shown"] * 5 + ["not measured"] + ["not shown"] * 2
    # Text that is harder further on is no break: it is so for all stacks.
    harder = {name: [b + 0.3 * i for i, b in enumerate(bits)] for name, bits in shown.items()}
    assert verdicts("beyond_training", harder)[4:] == ["shown"] * 4


def share_records(text: Sequence[float], recall: Sequence[float]) -> list[Record]:
    shares = ("000", "025", "050", "075", "100")
    groups = ("64 tokens, 8 pairs", "256 tokens, 32 pairs")
    drawn = zip(shares, recall, strict=True)
    return [
        *(r for s, bits in zip(shares, text, strict=True) for r in cases.over_seeds(f"text_{s}", {"all": bits}, task="text")),
        *(r for s, v in drawn for r in cases.over_seeds(f"recall_{s}", dict.fromkeys(groups, v))),
    ]


def test_attention_share_is_shown_and_not_shown() -> None:
    study = find_study("attention_share")
    shown = share_records((2.2, 2.1, 2.15, 2.2, 2.25), (0.1, 0.99, 0.99, 1.0, 0.99))
    assert [claim.verdict for claim in study.finding(shown).claims] == ["shown"] * 7
    unlike = share_records((2.0, 2.1, 2.15, 2.2, 2.05), (0.99, 0.9, 0.5, 0.99, 0.98))
    assert [claim.verdict for claim in study.finding(unlike).claims] == [
        *["not shown"] * 5, "shown", "not shown",
    ]
    unlearnt = share_records((2.2, 2.1, 2.15, 2.2, 2.25), (0.1, 0.1, 0.1, 0.1, 0.1))
    assert [claim.verdict for claim in study.finding(unlearnt).claims][4:] == ["not shown", "not shown", "not measured"]


def parameters(recipe: Recipe) -> int:
    return sum(p.numel() for p in Subject.from_recipe(recipe, "counted", device="meta").build().parameters())


@pytest.mark.parametrize(
    ("name", "beginning"),
    [("attention_share", "text_"), ("attention_share", "recall_"), ("beyond_training", ""), ("text_positions", "")],
)
def test_recipes_are_equal_in_parameters(name: str, beginning: str) -> None:
    recipes = {recipe: r for recipe, r in find_study(name).load().items() if recipe.startswith(beginning)}
    counts = {recipe: parameters(r) for recipe, r in recipes.items()}
    assert len(counts) == 5
    assert max(counts.values()) <= 1.01 * min(counts.values()), counts


def test_untuned_recipes_differ_from_the_trained_one_in_their_scaling_alone() -> None:
    study = find_study("text_positions")
    trained = study.load()["rope"].to_dict()
    assert set(study.untuned.values()) == {"rope"}
    for name, recipe in study.load_untuned().items():
        table = recipe.to_dict()
        scaling = table["model"]["blocks"]["a"]["mixer"]["position"].pop("scaling")
        assert scaling["factor"] == 32, name
        other = trained["model"]["blocks"]["a"]["mixer"]["position"]
        assert table["model"]["blocks"]["a"]["mixer"]["position"] == {k: v for k, v in other.items() if k != "scaling"}
        del table["meta"], table["model"]["blocks"]["a"]["mixer"]["position"]
        same = {section: trained[section] for section in table}
        rest = {**same["model"], "blocks": {"a": {**same["model"]["blocks"]["a"]}}}
        mixer = {k: v for k, v in rest["blocks"]["a"]["mixer"].items() if k != "position"}
        rest["blocks"]["a"] = {**rest["blocks"]["a"], "mixer": mixer}
        assert table == {**same, "model": rest}


def test_the_page_has_the_loss_along_documents() -> None:
    study = find_study("text_positions")
    records = [cases.beyond("alibi", (2.25, 2.5, None)), cases.beyond("rope_pi", (4.5, 4.0, 4.0))]
    text = finding_markdown(study, records, study.finding(records))
    assert "| bits a byte, positions up to | 128 | 256 | 512 |" in text
    assert "| alibi | 2.250 | 2.500 | not measured |" in text
