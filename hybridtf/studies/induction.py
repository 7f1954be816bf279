"""Induction heads: which stacks find a token again beyond the trained length (Gu and Dao, *Mamba*, appendix E.1)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.bench.records import Record
from hybridtf.studies.base import Study
from hybridtf.studies.claims import Finding, Measures, claim

TRAINED, FOUR, SIXTEEN, SIXTY_FOUR = "64 tokens", "256 tokens", "1024 tokens", "4096 tokens"


def finding(records: Sequence[Record]) -> Finding:
    """State-space layers hold to 16 times the trained length, with one position-free attention layer to 64 times; rotary
    attention falls between 4 and 16 times."""
    found = Measures(records)
    mamba = claim("Mamba-2 alone learns the task", found.quality("mamba2", TRAINED), at_least=0.98)
    hybrid = claim("Mamba-2 below position-free attention learns the task", found.quality("hybrid", TRAINED), at_least=0.98)
    rotary = claim("Rotary attention learns the task", found.quality("rope_attention", TRAINED), at_least=0.9)
    return Finding((
        mamba, hybrid, rotary,
        claim("Mamba-2 alone holds at 16 times the trained length", found.quality("mamba2", SIXTEEN),
              at_least=0.95, provided=mamba),
        claim("Mamba-2 below position-free attention holds at 64 times", found.quality("hybrid", SIXTY_FOUR),
              at_least=0.98, provided=hybrid),
        claim("Rotary attention has fallen at 4 times", found.quality("rope_attention", FOUR), at_most=0.8, provided=rotary),
        claim("Rotary attention is lost at 16 times", found.quality("rope_attention", SIXTEEN), at_most=0.3, provided=rotary),
    ))


STUDY = Study(
    name="induction",
    title="Induction heads beyond the trained length",
    question="Trained on 64 tokens, up to which length does a stack still say what followed the special token?",
    paper="Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, appendix E.1, "
          "https://arxiv.org/abs/2312.00752",
    recipes=("mamba2", "hybrid", "rope_attention"),
    finding=finding,
)
