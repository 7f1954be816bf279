"""Findings of passkey, selective copying and copying tell shown from not shown, on hand-made records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtf.bench.records import Record
from hybridtf.studies import find_study
from tests.studies import study_cases as cases

DEPTHS = ("0", "0.25", "0.5", "0.75", "1")


def passkey(values: Mapping[str, tuple[float | Sequence[float], ...]]) -> list[Record]:
    """Records of recipes by what they reach at 96, 768 and 4,096 tokens: at all depths, or at each of five."""
    found = []
    for recipe, by_length in values.items():
        groups = {}
        for length, value in zip((96, 768, 4096), by_length, strict=True):
            each = [value] * len(DEPTHS) if isinstance(value, int | float) else value
            groups |= {f"{length} tokens, depth {depth}": v for depth, v in zip(DEPTHS, each, strict=True)}
        found += cases.over_seeds(recipe, groups)
    return found


def test_passkey_is_shown_and_not_shown() -> None:
    study = find_study("passkey")
    recent = [0.1, 0.1, 0.1, 0.2, 0.96]
    shown = study.finding(passkey({
        "window_nope": (1.0, 1.0, 1.0), "mamba2_nope": (1.0, 0.99, [0.9, 0.8, 0.7, 0.8, 0.9]),
        "rope_attention": (0.97, 0.2, 0.1), "mamba2_window": (0.4, recent, 0.1),
    })).claims
    assert [claim.verdict for claim in shown] == ["shown"] * 10
    one_depth_lost = [1.0, 1.0, 0.5, 1.0, 1.0]
    unlike = study.finding(passkey({
        "window_nope": (1.0, one_depth_lost, one_depth_lost), "mamba2_nope": (1.0, one_depth_lost, 0.5),
        "rope_attention": (0.97, 0.9, 0.9), "mamba2_window": (0.9, [0.1, 0.1, 0.1, 0.9, 0.96], 0.1),
    })).claims
    assert [claim.verdict for claim in unlike] == ["shown"] * 3 + ["not shown"] * 5 + ["shown", "not shown"]
    never = study.finding(passkey({
        "window_nope": (0.1, 0.1, 0.1), "mamba2_nope": (0.1, 0.1, 0.1), "rope_attention": (0.1, 0.1, 0.1),
        "mamba2_window": (0.1, 0.1, 0.1),
    })).claims
    assert [claim.verdict for claim in never] == ["not shown"] * 3 + ["not measured"] * 5 + ["not shown", "not measured"]


def test_selective_copying_is_shown_and_not_shown() -> None:
    study = find_study("selective_copying")
    groups = ("64 tokens, 4 data", "256 tokens, 4 data")

    def verdicts(**values: tuple[float, float]) -> list[str]:
        records = [r for name, v in values.items() for r in cases.over_seeds(name, dict(zip(groups, v, strict=True)))]
        return [claim.verdict for claim in study.finding(records).claims]

    shown = verdicts(mamba2=(1, 0.82), s4d=(0.4, 0.1), h3=(0.7, 0.1), griffin=(0.9, 0.72), rope_attention=(0.95, 0.13))
    assert shown == ["shown"] * 10
    unlike = verdicts(mamba2=(0.96, 0.5), s4d=(0.97, 0.1), h3=(0.96, 0.1), griffin=(0.86, 0.5), rope_attention=(0.95, 0.4))
    assert unlike == ["shown", *["not shown"] * 4, "shown", "shown", *["not shown"] * 3]


def test_copying_is_shown_and_not_shown() -> None:
    study = find_study("copying")
    groups = ("16 letters", "24 letters", "32 letters", "64 letters")

    def verdicts(**values: tuple[float, ...]) -> list[str]:
        records = [r for name, v in values.items() for r in cases.over_seeds(name, dict(zip(groups, v, strict=True)))]
        return [claim.verdict for claim in study.finding(records).claims]

    attention = {"rope_attention": (0.95, 0.2, 0.0, 0.0), "nope_attention": (0.2, 0.0, 0.0, 0.0)}
    assert verdicts(
        hybrid=(0.99, 0.98, 0.96, 0.7), mamba2_n16=(0.1, 0, 0, 0), mamba2_n64=(0.3, 0.05, 0, 0), **attention
    ) == ["shown"] * 9
    assert verdicts(
        hybrid=(0.95, 0.9, 0.8, 0.3), mamba2_n16=(0.96, 0.9, 0.5, 0), mamba2_n64=(0.96, 0.9, 0.4, 0),
        rope_attention=(0.95, 0.9, 0.9, 0.8), nope_attention=(0.2, 0, 0, 0),
    ) == ["shown"] * 2 + ["not shown"] * 7
