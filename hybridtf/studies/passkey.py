"""Passkey: digits in random filler, far beyond the trained length and at every depth (Ren et al., *Samba*)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.bench.records import Record
from hybridtf.studies.base import Study
from hybridtf.studies.claims import Finding, Measures, Series, claim, combine, highest, lowest

TRAINED, EIGHT, FORTY_THREE = 96, 768, 4096
"""Tokens of a row: as trained, 8 and 43 times that."""
DEPTHS = ("0", "0.25", "0.5", "0.75", "1")
"""Shares of the row that lie before the key; 1 is right before the question."""


def finding(records: Sequence[Record]) -> Finding:
    """One position-free attention layer above local layers finds the key at every depth of rows 8 to 43 times as long as
    trained; rotary attention is lost at 8 times; Mamba-2 and a window hold recent depths alone."""
    found = Measures(records)

    def at(recipe: str, length: int, depths: Sequence[str] = DEPTHS) -> list[Series]:
        return [found.quality(recipe, f"{length} tokens, depth {depth}") for depth in depths]

    def mean(recipe: str, length: int) -> Series:
        return combine(lambda *values: sum(values) / len(values), *at(recipe, length))

    window = claim("A window below position-free attention learns the task", mean("window_nope", TRAINED), at_least=0.95)
    hybrid = claim("Mamba-2 below position-free attention learns the task", mean("mamba2_nope", TRAINED), at_least=0.95)
    rotary = claim("Rotary attention learns the task", mean("rope_attention", TRAINED), at_least=0.9)
    last = found.quality("mamba2_window", f"{EIGHT} tokens, depth {DEPTHS[-1]}")
    recent = claim("Mamba-2 and a window find the last key at 8 times", last, at_least=0.8)
    return Finding((
        window, hybrid, rotary,
        claim("A window below position-free attention holds at 8 times the trained length, at its worst depth",
              lowest(*at("window_nope", EIGHT)), at_least=0.95, provided=window),
        claim("The same at 43 times", lowest(*at("window_nope", FORTY_THREE)), at_least=0.95, provided=window),
        claim("Mamba-2 below position-free attention holds at 8 times, at its worst depth",
              lowest(*at("mamba2_nope", EIGHT)), at_least=0.95, provided=hybrid),
        claim("Mamba-2 below position-free attention holds at 43 times, over all depths", mean("mamba2_nope", FORTY_THREE),
              at_least=0.8, provided=hybrid),
        claim("Rotary attention is lost at 8 times", mean("rope_attention", EIGHT), at_most=0.3, provided=rotary),
        recent,
        claim("They find none that lies deeper, at the best depth of 0 to .75",
              highest(*at("mamba2_window", EIGHT, DEPTHS[:-1])), at_most=0.3, provided=recent),
    ))


STUDY = Study(
    name="passkey",
    title="Passkey: how far back and at what depth",
    question="Trained on 96 tokens, which stacks find a number in rows of up to 4,096, wherever it lies?",
    paper="Ren et al., Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language Modeling, "
          "https://arxiv.org/abs/2406.07522",
    recipes=("rope_attention", "mamba2", "mamba2_window", "mamba2_nope", "window_nope"),
    finding=finding,
)
