"""Sentences say what the records say, and no more."""

import pytest

from hybridtf.bench.quality import COLUMNS
from hybridtf.report.differences import difference_tables
from hybridtf.report.evidence import gather
from hybridtf.report.sentences import sentences
from tests.report import sample


def said(records: list[dict]) -> dict[str, str]:
    return dict(sentences(gather(records)))


def test_the_lowest_and_a_difference_that_is_one() -> None:
    text = said(sample.records())
    assert text["hybrid-3m1a"].startswith(
        "has the lowest held-out bits per byte, 2.131 (95 % interval 2.101 to 2.161), 1.3 below the bigram model's 3.39"
        "; the difference from mamba2 (0.11 higher) is more than chance gives"
    )
    assert "lowest" not in text["attention"]
    assert "at 16 times the trained length it gets worse (2.284 to 4.364)" in text["attention"]
    assert "it trains at 11,930 tokens/s, the fastest" in text["attention"]
    assert "its state stays at 586\u202fkB whatever the length" in text["mamba2"]
    assert "its state grows from 4.19\u202fMB at 1,024 tokens to 268\u202fMB at 65,536 tokens" in text["attention"]


def test_a_difference_within_the_intervals() -> None:
    close = sample.quality("attention", shift=-0.03)
    text = said([close, sample.quality("mamba2")])
    for label in ("attention", "mamba2"):
        assert "no more than chance may give, so the two cannot be told apart" in text[label]


def test_without_intervals_nothing_is_claimed() -> None:
    records = [{**sample.quality(name), "units": None} for name in ("attention", "mamba2")]
    assert "nothing says whether the difference" in said(records)["attention"]


def test_worse_than_the_bigram() -> None:
    assert "0.85 above the bigram model's 3.39" in said([sample.quality("mamba2", shift=2.0)])["mamba2"]


def test_alone_it_is_not_the_lowest_of_anything() -> None:
    text = said([sample.quality("mamba2"), sample.speed("mamba2", "train")])["mamba2"]
    assert "lowest" not in text
    assert "fastest" not in text
    assert "difference" not in text


def test_what_is_missing_is_not_spoken_of() -> None:
    text = said([sample.memory("mamba2")])["mamba2"]
    assert text == "was not scored on held-out data."


def test_a_failed_training_comes_first() -> None:
    record = {**sample.train("mamba2"), "failed": "the loss was not finite at step 12"}
    text = said([record, sample.quality("mamba2")])["mamba2"]
    assert text.startswith("its training with seed 0 ended early (the loss was not finite at step 12); reaches")


def test_accuracy_is_better_the_higher() -> None:
    text = said([sample.recall("attention", 0.61), sample.recall("hybrid-3m1a", 0.98)])
    assert text["hybrid-3m1a"].startswith(
        "has the highest held-out accuracy, 0.980 (95 % interval 0.970 to 0.990), 0.91 above the 0.0729 of the trivial model "
        "'own value'; the difference from attention (0.37 lower) is more than chance gives"
    )
    assert "the difference from hybrid-3m1a (0.37 higher) is more than chance gives" in text["attention"]


def test_the_sentence_and_the_table_of_differences_say_the_same() -> None:
    """Seeds that move together: the difference shows although the intervals of the two overlap."""
    shifts = {0: -0.3, 1: 0.0, 2: 0.3}
    records = [sample.quality(name, seed, shift) for name in ("attention", "mamba2") for seed, shift in shifts.items()]
    evidence = gather([{**r, "value": r["value"] + 0.001 * r["seed"]} if r["recipe"] == "mamba2" else r for r in records])
    (table,) = difference_tables(evidence)
    assert table.rows[0]["verdict"] == "worse"
    assert "is more than chance gives" in dict(sentences(evidence))["attention"]


def test_records_without_sums_by_document_are_compared_over_their_seeds_alone() -> None:
    names = ("attention", "mamba2")
    records = [
        {**sample.quality(name, seed, 0.001 * seed * (name == "mamba2")), "units": None} for name in names for seed in (0, 1, 2)
    ]
    (table,) = difference_tables(gather(records))
    assert [(row["verdict"], row["n_documents"]) for row in table.to_rows()] == [("worse", 0)]
    assert "judged by seeds alone" in table.notes[1]
    (one,) = difference_tables(gather(records[::3]))
    assert (one.to_rows()[0]["verdict"], one.to_rows()[0]["difference"]) == ("unknown", pytest.approx(0.041))
    assert "show no spread" in one.notes[1] or "one seed" in one.notes[1]


@pytest.mark.parametrize("units", [{"nats": 1}, [1, 2], dict.fromkeys(COLUMNS, "x"), dict.fromkeys(COLUMNS, (1, 2, 3))])
def test_sums_that_cannot_be_read_are_none(units: object) -> None:
    records = [{**sample.quality(name), "units": units} for name in ("attention", "mamba2")]
    assert difference_tables(gather(records))[0].rows[0]["verdict"] == "unknown"


def timed(name: str, rate: float, time: float, verdict: str, **more: object) -> dict:
    """A record beside attention, which it takes ``time`` times as long as."""
    ends = [0.98 * time, 1.02 * time]
    ratio = {"against": "attention", "time": time, "interval": ends, "verdict": verdict, "refused": [], **more}
    return {**sample.speed(name, "train"), "tokens_per_s": rate, "spread_s": 0.0, "ratio": ratio}


@pytest.mark.parametrize(
    ("mamba2", "hybrid", "fastest", "alike"),
    [
        ((90, 1.11, "slower"), (80, 1.25, "slower"), "attention", None),
        ((99, 1.01, "~"), (80, 1.25, "slower"), "attention", "mamba2"),
        ((150, 0.67, "faster"), (120, 0.83, "faster"), "mamba2", None),
        ((122, 0.82, "faster"), (120, 0.83, "faster"), "mamba2", "hybrid-3m1a"),
        ((150, 0.67, "~"), (120, 0.83, "faster"), "mamba2", "attention"),
    ],
)
def test_the_fastest_is_what_the_verdicts_bear(mamba2: tuple, hybrid: tuple, fastest: str, alike: str | None) -> None:
    text = said([timed("attention", 100, 1.0, "~"), timed("mamba2", *mamba2), timed("hybrid-3m1a", *hybrid)])
    assert [name for name in text if "the fastest" in text[name]] == ([fastest] if alike is None else [])
    if alike is not None:
        assert f"the highest rate, but nothing measured tells it from that of {alike}" in text[fastest]


def test_a_refused_ratio_and_an_unknown_interval_bear_no_fastest() -> None:
    few = {"refused": ["5 rounds are too few"]}
    text = said([timed("attention", 100, 1.0, "~", **few), timed("mamba2", 50, 2.0, "~", **few)])
    assert "the fastest" not in text["attention"]
    text = said([timed("attention", 100, 1.0, "", **few), timed("mamba2", 50, 2.0, "", **few)])
    assert "the fastest" not in text["attention"]
    records = [{**sample.speed(name, "train"), "spread_s": None} for name in ("attention", "mamba2")]
    assert "nothing measured tells it from that of mamba2" in said(records)["attention"]


def test_a_seed_that_failed_leaves_no_mean() -> None:
    records = [sample.quality("mamba2"), sample.train("mamba2"), sample.failed("mamba2", "NonFiniteError: nan", 1)]
    text = said(records)["mamba2"]
    assert "seed 1 ended early" in text
    assert "has no held-out score (not finite in 1 of 2 seeds)" in text
    assert "2.2" not in text


def read_far(n_documents: int, change: object) -> str:
    """Of a model whose level rises by 0.6 bits, each level with an interval of 1 bit either way."""
    record = {
        **sample.extrapolation("mamba2"), "multiples": [1, 16], "bits_per_byte": [2.0, 2.6],
        "interval": [[1.0, 3.0], [1.6, 3.6]], "n_documents": n_documents, "change": [None, change],
    }
    return said([record])["mamba2"]


def test_a_level_is_kept_or_not_by_the_documents_own_change() -> None:
    """Intervals of two levels overlap where the documents differ, whatever each of them does."""
    surely = {"value": 0.6, "interval": [0.5, 0.7]}
    assert "at 16 times the trained length it gets worse (" in read_far(25, surely)
    rows = sample.beyond("attention")  # of another protocol: it says nothing of texts
    ((_, text),) = sentences(gather([sample.extrapolation("attention"), rows]))
    assert "it gets worse" in text
    assert "it gets better" in read_far(25, {"value": -0.6, "interval": [-0.7, -0.5]})
    assert "no change of its level shows" in read_far(25, {"value": 0.6, "interval": [-0.1, 1.3]})
    for text in (read_far(2, surely), read_far(25, None), read_far(25, {"value": 0.6, "interval": None})):
        assert "at 16 times the trained length it cannot be told whether its level changes" in text
        assert "keeps" not in text
