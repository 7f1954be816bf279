"""Copying: a state of a fixed size falls behind the string, attention does not (Jelassi et al., *Repeat after me*)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.bench.records import Record
from hybridtf.studies.base import Study
from hybridtf.studies.claims import Finding, Measures, claim, difference, highest

TRAINED, TWO, FOUR = "16 letters", "32 letters", "64 letters"
FIXED = ("mamba2_n16", "mamba2_n64")


def finding(records: Sequence[Record]) -> Finding:
    """Strings that are right as a whole: one position-free attention layer above Mamba-2 holds to four times the trained
    length, Mamba-2 alone falls at twice, whatever its state, and rotary attention falls by its positions."""
    found = Measures(records)
    hybrid = claim("Mamba-2 below position-free attention says strings of 16", found.quality("hybrid", TRAINED), at_least=0.9)
    rotary = claim("Rotary attention says strings of 16", found.quality("rope_attention", TRAINED), at_least=0.9)
    fixed = {name: found.quality(name, TRAINED) for name in FIXED}
    both = "strings right"
    return Finding((
        hybrid, rotary,
        claim("Mamba-2 alone does not say strings of 16 as often, by its better state",
              difference(found.quality("hybrid", TRAINED), highest(*fixed.values())), at_least=0.05, what=f"more {both}"),
        claim("The pair holds at strings of 32", found.quality("hybrid", TWO), at_least=0.9, provided=hybrid),
        claim("The pair holds at strings of 64", found.quality("hybrid", FOUR), at_least=0.5, provided=hybrid),
        *(claim(f"Mamba-2 with a state of {name[8:]} a channel fails at 32", found.quality(name, TWO), at_most=0.1)
          for name in FIXED),
        claim("A state of 64 is better than one of 16", difference(fixed["mamba2_n64"], fixed["mamba2_n16"]),
              at_least=0.02, what=f"more {both}"),
        claim("Rotary attention fails at 64", found.quality("rope_attention", FOUR), at_most=0.1, provided=rotary),
    ))


STUDY = Study(
    name="copying",
    title="Copying: a string against a state",
    question="Which stacks say a string again when it is longer than those that were trained?",
    paper="Jelassi et al., Repeat After Me: Transformers are Better than State Space Models at Copying, "
          "https://arxiv.org/abs/2402.01032",
    recipes=("rope_attention", "nope_attention", "mamba2_n16", "mamba2_n64", "hybrid"),
    finding=finding,
)
