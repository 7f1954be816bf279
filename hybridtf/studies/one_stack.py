"""One stack for all: which one holds recall, length and state tracking at once, with one recipe for all tasks.

Each ability is held where the task's measure, far from what was trained, keeps a bound: :data:`ABILITIES`. Delta rules with
eigenvalues to -1 track states (Grazzi et al.), a layer of attention without positions recalls and holds lengths, a window
sees what is near: a stack of the three is asked to do what none of them does alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.bench.records import Record
from hybridtf.studies.base import Study, StudyTask
from hybridtf.studies.claims import Finding, Measures, Series, claim, combine, highest, lowest

_TO_THE_END = "train.stop_at=2.0"
"""Words of the trained length are right long before longer ones are."""

TASKS = {
    "recall": StudyTask({"type": "mqar_small", "validation": True}, ("train.steps=1200",)),
    "length": StudyTask({"type": "induction_heads_small", "validation": True}),
    "parity": StudyTask({"type": "parity_small", "validation": True}, ("train.batch_size=64", _TO_THE_END)),
    "s3": StudyTask({"type": "s3_small", "validation": True}, ("train.batch_size=64", "train.steps=1200")),
}

ABILITIES = {
    "recall": ("recall", "256 tokens, 32 pairs", 0.9),
    "length": ("length", "1024 tokens", 0.95),
    "parity": ("parity", "256 tokens", 0.95),
    "permutations": ("s3", "24 tokens", 0.95),
}
"""By name: the task, the group of rows and the least accuracy. They are the bounds of the studies of each: four times the
pairs, 16 times the length, ten times the word, twice the word."""

CANDIDATES = ("delta_product", "delta_negative")
OTHERS = ("delta_positive", "delta_alone", "mamba2_attention", "rope_attention")


def margin(found: Measures, recipe: str) -> Series:
    """How far the weakest ability is above its bound; below 0 where one is not held."""
    return lowest(*(_above(found, recipe, name) for name in ABILITIES))


def finding(records: Sequence[Record]) -> Finding:
    """Two Householder steps, a window and attention without positions hold all four at once, and no stack without negative
    eigenvalues does; each of the others lacks what theory says that it lacks."""
    found = Measures(records)

    def accuracy(recipe: str, ability: str) -> Series:
        task, group, _ = ABILITIES[ability]
        return found.quality(recipe, group, task=task)

    alone = [claim(f"Two Householder steps, a window and position-free attention hold {name}", accuracy("delta_product", name),
                   at_least=bound) for name, (_, _, bound) in ABILITIES.items()]
    three = combine(min, *(_above(found, "delta_negative", name) for name in ("recall", "length", "parity")))
    return Finding((
        *alone,
        claim("One step a token holds all but permutations", three, at_least=0.0, what="weakest above its bound"),
        claim("With eigenvalues from 0 it does not hold parity", accuracy("delta_positive", "parity"), at_most=0.6),
        claim("Mamba-2 below attention does not hold parity", accuracy("mamba2_attention", "parity"), at_most=0.6),
        claim("Rotary attention does not hold length", accuracy("rope_attention", "length"), at_most=0.3),
        claim("Delta rules without attention do not hold recall", accuracy("delta_alone", "recall"), at_most=0.6),
        claim("No other stack holds all", highest(*(margin(found, name) for name in OTHERS)), at_most=0.0,
              what="weakest above its bound, of the best of them"),
    ), tuple(_holders(found, seed) for seed in found.seeds))


def _above(found: Measures, recipe: str, ability: str) -> Series:
    task, group, bound = ABILITIES[ability]
    return combine(lambda value: value - bound, found.quality(recipe, group, task=task))


def _holders(found: Measures, seed: int) -> str:
    """Who holds what with a seed."""
    held = []
    for recipe in found.recipes:
        above = {name: _above(found, recipe, name).get(seed) for name in ABILITIES}
        names = [name for name, value in above.items() if value is not None and value >= 0]
        missing = [name for name, value in above.items() if value is None]
        said = "all at once" if len(names) == len(ABILITIES) else ", ".join(names) or "nothing"
        held.append(f"{recipe} {said}" + (f" (not measured: {', '.join(missing)})" if missing else ""))
    return f"Seed {seed}, held: {'; '.join(held)}"


STUDY = Study(
    name="one_stack",
    title="One stack for all",
    question="Which stack holds recall, length and state tracking at once?",
    paper="Grazzi et al., Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, https://arxiv.org/abs/2411.12537",
    recipes=(*CANDIDATES, *OTHERS),
    finding=finding,
    tasks=TASKS,
    smoke={"*": ("train.stop_at=2.0",)},
)
