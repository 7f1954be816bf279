"""What the numbers say, one plain sentence a recipe: computed from the records, silent on what they do not show."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.report import differences, numbers, speeds
from hybridtf.report import evidence as ev

FAR = 16
"""The multiple of the trained length that the sentence speaks of, or the longest measured below it."""


def sentences(evidence: ev.Evidence) -> list[tuple[str, str]]:
    """(label, sentence) for each recipe. The sentence does not repeat the label."""
    measure = evidence.measure()
    scores = {s.label: score for s in evidence.subjects if (score := ev.quality(s, measure)) is not None}
    trivial = evidence.baseline(measure)
    pairs = [] if measure is None else differences.pairwise(evidence, measure)
    out = []
    for subject in evidence.subjects:
        parts = [
            _failure(subject),
            _quality(subject, measure, scores, trivial, pairs),
            _extrapolation(subject),
            _speed(evidence, subject, "train", "trains"),
            _speed(evidence, subject, "decode", "decodes"),
            _state(subject),
        ]
        said = [part for part in parts if part]
        out.append((subject.label, ("; ".join(said) if said else "has no measurement that can be compared") + "."))
    return out


def _failure(subject: ev.Subject) -> str:
    """Why its training ended early, for the seeds for which it did."""
    reasons = {str(r.get("seed")): str(r["failed"]) for r in subject.of("train") if r.get("failed")}
    said = [f"its training with seed {seed} ended early ({reason})" for seed, reason in reasons.items()]
    return "; ".join(said)


def _quality(
    subject: ev.Subject, measure: ev.Measure | None, scores: dict[str, ev.Measured], trivial: str | None,
    pairs: Sequence[differences.Pair],
) -> str:
    own = scores.get(subject.label)
    if own is None or measure is None:
        why = ev.quality_outcome(subject, measure)
        return f"has no held-out score ({why})" if why else "was not scored on held-out data"
    score = numbers.digits(own.value, own.half)
    most = "highest" if measure.higher_is_better else "lowest"
    first = len(scores) > 1 and subject.label == measure.best(scores)
    text = f"has the {most} held-out {measure.words}, {score}" if first else f"reaches {score} held-out {measure.words}"
    if own.low is not None and own.high is not None:
        text += f" (95 % interval {numbers.interval(own.low, own.high)})"
    if own.n_seeds > 1:
        text += f", the mean of {own.n_seeds} seeds"
    baseline = ev.baseline(subject, measure, trivial)
    if baseline is not None:
        text += _beside(own, baseline, str(trivial))
    return text if len(scores) == 1 else f"{text}; {_difference(subject, measure, scores, pairs)}"


def _difference(
    subject: ev.Subject, measure: ev.Measure, scores: dict[str, ev.Measured], pairs: Sequence[differences.Pair]
) -> str:
    """Whether it differs from the best of the others, which is the best of all where it is not that itself: as the table of
    differences has it."""
    rival = measure.best({name: score for name, score in scores.items() if name != subject.label})
    assert rival is not None  # there are two at least
    gap = scores[rival].value - scores[subject.label].value
    if gap == 0:
        return f"{rival} has the same"
    named = f"the difference from {rival} ({numbers.digits(abs(gap), None, 2)} {'higher' if gap > 0 else 'lower'})"
    found = differences.between(pairs, subject.label, rival)
    if found is None or found.verdict == "unknown":
        return f"without an interval of it, nothing says whether {named} is more than chance"
    if found.verdict == "~":
        return f"{named} is no more than chance may give, so the two cannot be told apart"
    return f"{named} is more than chance gives"


def _beside(own: ev.Measured, baseline: ev.Measured, name: str) -> str:
    gap, model = own.value - baseline.value, "bigram model" if name == "bigram" else f"trivial model {name.replace('_', ' ')!r}"
    if gap == 0:
        return f", as much as the {model}"
    side = "below" if gap < 0 else "above"
    level = numbers.digits(baseline.value)
    said = f"the bigram model's {level}" if name == "bigram" else f"the {level} of the {model}"
    return f", {numbers.digits(abs(gap), None, 2)} {side} {said}"


def _extrapolation(subject: ev.Subject) -> str:
    multiples = sorted({m for r in subject.of("extrapolation") for m in ev.by_multiple(r, "bits_per_byte") if m <= FAR})
    scored = {m: score for m in multiples if (score := ev.at_multiple(subject, m)) is not None}
    far = max(scored, default=1.0)
    if far <= 1 or 1 not in scored:
        return ""
    near, there = scored[1], scored[far]
    values = f"{numbers.digits(near.value, near.half)} to {numbers.digits(there.value, there.half)}"
    where = f"at {far:g} times the trained length"
    change = ev.change_at_multiple(subject, far)
    if change is None or change.low is None or change.high is None:
        why = "no interval of the change over enough documents"
        return f"{where} it cannot be told whether its level changes ({values}; {why})"
    if change.low <= 0 <= change.high:
        spread = numbers.interval(change.low, change.high)
        return f"{where} no change of its level shows ({values}; 95 % interval of the change {spread})"
    return f"{where} it gets {'worse' if change.value > 0 else 'better'} ({values})"


def _speed(evidence: ev.Evidence, subject: ev.Subject, phase: str, verb: str) -> str:
    condition = evidence.condition("speed", phase)
    found = {s.label: rate for s in evidence.subjects if (rate := ev.speed(s, phase, condition)) is not None}
    own = found.get(subject.label)
    if own is None:
        return ""
    text = f"it {verb} at {numbers.digits(own.value, own.half)} tokens/s"
    others = [s for s in evidence.subjects if s.label != subject.label and s.label in found]
    if not others or own.value <= max(found[s.label].value for s in others):
        return text
    alike = [s.label for s in others if not speeds.faster(subject, s, phase, condition)]
    if not alike:
        return f"{text}, the fastest"
    return f"{text}, the highest rate, but nothing measured tells it from that of {' and '.join(alike)}"


def _state(subject: ev.Subject) -> str:
    short, long = (ev.state_bytes(subject, length) for length in (1024, 65536))
    if short is None or long is None:
        return ""
    if short.value == long.value:
        return f"its state stays at {numbers.in_bytes(long.value)} whatever the length"
    sizes = ((short, 1024), (long, 65536))
    first, last = (f"{numbers.in_bytes(size.value)} at {numbers.thousands(n)} tokens" for size, n in sizes)
    return f"its state grows from {first} to {last}"
