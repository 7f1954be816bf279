"""Selective copying: what to keep depends on the content, which a time-invariant recurrence cannot see (Gu and Dao)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.bench.records import Record
from hybridtf.studies.base import Study
from hybridtf.studies.claims import Finding, Measures, claim, difference

TRAINED, FOUR = "64 tokens, 4 data", "256 tokens, 4 data"


def finding(records: Sequence[Record]) -> Finding:
    """A recurrence whose steps depend on the input solves the task, a time-invariant one does not, gates between
    time-invariant ones help by half; recurrences with a window hold beyond the trained length and rotary attention does not."""
    found = Measures(records)
    selective, invariant = found.quality("mamba2", TRAINED), found.quality("s4d", TRAINED)
    griffin = claim("Griffin's recurrences around a window solve it", found.quality("griffin", TRAINED), at_least=0.85)
    rotary = claim("Rotary attention solves it", found.quality("rope_attention", TRAINED), at_least=0.85)
    solved = claim("Mamba-2, whose steps depend on the input, solves it", selective, at_least=0.95)
    return Finding((
        solved,
        claim("S4D, which is time-invariant, does not", invariant, at_most=0.6),
        claim("Input-dependent steps are better than time-invariant ones", difference(selective, invariant), at_least=0.2,
              what="more accuracy"),
        claim("H3, time-invariant between multiplications, is better than S4D",
              difference(found.quality("h3", TRAINED), invariant), at_least=0.02, what="more accuracy"),
        claim("H3 is behind Mamba-2", difference(selective, found.quality("h3", TRAINED)), at_least=0.02,
              what="more accuracy"),
        griffin, rotary,
        claim("Mamba-2 holds at 4 times the trained length", found.quality("mamba2", FOUR), at_least=0.7, provided=solved),
        claim("Griffin holds at 4 times", found.quality("griffin", FOUR), at_least=0.7, provided=griffin),
        claim("Rotary attention is lost at 4 times", found.quality("rope_attention", FOUR), at_most=0.3, provided=rotary),
    ))


STUDY = Study(
    name="selective_copying",
    title="Selective copying: steps that depend on the input",
    question="Which stacks say the tokens that lie among blanks, in their order?",
    paper="Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, appendix E.1, "
          "https://arxiv.org/abs/2312.00752",
    recipes=("mamba2", "s4d", "h3", "rope_attention", "griffin", "hybrid"),
    finding=finding,
)
