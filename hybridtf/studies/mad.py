"""The MAD score: six small tasks in which stacks differ, and whether their mean foretells the loss on text (Poli et al.,
*Mechanistic Design and Scaling of Hybrid Architectures*)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridtf.bench.records import Record
from hybridtf.studies.base import QUALITY, Study, StudyTask
from hybridtf.studies.claims import Finding, Measures, Series, claim, combine, difference, highest
from hybridtf.studies.ranks import spearman, spearman_interval

TEXT = "text"
_LONGER = ("train.steps=300",)


def _drawn(type_name: str, **options: Any) -> dict[str, Any]:
    """Rows of 64 tokens, trained and tested alike: a score is no matter of length here."""
    sizes = options.pop("sizes", {})
    rows = {"train": [{"length": 64, "n_rows": 20_000, **sizes}], "test": [{"length": 64, "n_rows": 256, **sizes}]}
    return {"type": type_name, **options, **rows}


TASKS = {
    "in_context_recall": StudyTask(_drawn("in_context_recall", vocab_size=16, train_on="all")),
    "fuzzy_recall": StudyTask(_drawn("fuzzy_recall", max_key=2, max_value=2, train_on="all"), _LONGER),
    "noisy_recall": StudyTask(_drawn("in_context_recall", vocab_size=32, n_noise=16, noise=0.2, train_on="all")),
    "selective_copying": StudyTask(_drawn("selective_copying", sizes={"n_data": 4}), _LONGER),
    "compression": StudyTask(
        {"type": "compression", "train": [{"length": 16, "n_rows": 20_000}], "test": [{"length": 16, "n_rows": 512}]},
        ("model.head={ type = \"position_decoder\" }",),
    ),
    "memorization": StudyTask({"type": "memorization_small"}),
    TEXT: StudyTask({"type": "text", "source": "sotu", "max_bytes": 2_000_000}),
}
"""The six of MAD at a half or a quarter of its lengths, and the text that they are to foretell."""
MAD = tuple(name for name in TASKS if name != TEXT)

HYBRID = ("window_attention", "mamba2_attention", "delta_attention")
ALIKE = ("attention", "mamba2", "delta_net", "gated_delta_net", "gla", "retnet", "mlstm", "rwkv7")
"""Stacks whose layers are all of one kind."""
FEWEST = 10
"""A correlation over fewer stacks is not claimed."""


def finding(records: Sequence[Record]) -> Finding:
    """Stacks that score higher in MAD have the lower loss on text, and the best score is that of a hybrid."""
    found = Measures(records)
    mad = {name: _score(found, name) for name in found.recipes}
    text = {name: found.quality(name, task=TEXT) for name in found.recipes}
    n = len(mad)

    def ranked(*values: float) -> float:
        return spearman(values[:n], values[n:])

    def upper(*values: float) -> float:
        return spearman_interval(values[:n], values[n:])[1]

    series = (*mad.values(), *text.values())
    enough = n >= FEWEST
    correlation = combine(ranked, *series) if enough else dict.fromkeys(found.seeds)
    bound = combine(upper, *series) if enough else dict.fromkeys(found.seeds)
    best = difference(_best(mad, HYBRID), _best(mad, ALIKE))
    return Finding((
        claim("Higher MAD scores go with lower loss on text", correlation, at_most=-0.5, what="rank correlation"),
        claim("The correlation is told from none", bound, at_most=0.0,
              what="upper end of its 95 % interval, stacks drawn again,"),
        claim("The best score is that of a hybrid", best, at_least=0.0, what="score above the best stack of one mixer"),
    ), _notes(mad, text, found.seeds))


def _score(found: Measures, recipe: str) -> Series:
    """The mean accuracy over the six tasks, by seed; None where one of them is missing."""
    return combine(lambda *values: math.fsum(values) / len(values), *(found.quality(recipe, task=task) for task in MAD))


def _best(scores: dict[str, Series], names: Sequence[str]) -> Series:
    """Of stacks of which one is missing there is no best."""
    return highest(*(scores.get(name, {}) for name in names))


def _notes(mad: dict[str, Series], text: dict[str, Series], seeds: Sequence[int]) -> tuple[str, ...]:
    """Each stack's score beside its loss, and the interval of the correlation, a line a seed."""
    notes = []
    for seed in seeds:
        pairs = {name: (mad[name].get(seed), text[name].get(seed)) for name in mad}
        known = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
        by_score = sorted(known.items(), key=lambda item: -item[1][0])
        notes.append(f"Seed {seed}, MAD score and bits a byte: "
                     + ("; ".join(f"{name} {a:.3f}, {b:.3f}" for name, (a, b) in by_score) or "none known"))
        if len(known) >= FEWEST:
            low, high = spearman_interval([a for a, _ in known.values()], [b for _, b in known.values()])
            notes.append(
                f"Seed {seed}: the rank correlation over {len(known)} stacks lies in {low:.2f} to {high:.2f} (95 %, bootstrap)"
            )
    return tuple(notes)


STUDY = Study(
    name="mad",
    title="The MAD score and the loss on text",
    question="Do six small tasks foretell which of eleven stacks reads text best?",
    paper="Poli et al., Mechanistic Design and Scaling of Hybrid Architectures, https://arxiv.org/abs/2403.17844",
    recipes=(*ALIKE, *HYBRID),
    finding=finding,
    tasks=TASKS,
    options=replace(QUALITY, eval_tokens=50_000, multiples=(1,), max_documents=2),
    smoke_options={"eval_tokens": 300},
)
