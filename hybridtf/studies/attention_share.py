"""How many layers of a stack of Mamba-2 should be attention, at equal parameters: a few, on text and on recall (Dao and Gu,
*Mamba-2*, section 9.2.3; Waleffe et al., *An Empirical Study of Mamba-based Language Models*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridtf.bench.records import Record
from hybridtf.studies.base import QUALITY, Study
from hybridtf.studies.claims import Finding, Measures, claim, difference, lowest

SHARES = (0, 25, 50, 75, 100)
"""Per cent of the four layers that are attention."""
MIXED = SHARES[1:-1]
TRAINED = "64 tokens, 8 pairs"


def finding(records: Sequence[Record]) -> Finding:
    """On text a stack of both kinds has the lowest loss, and one attention layer in four is better than none or all; on recall
    Mamba-2 alone fails, one layer in four solves the task, and no mixed stack is worse than attention alone."""
    found = Measures(records)
    text = {share: found.quality(f"text_{share:03d}") for share in SHARES}
    near = {share: found.quality(f"recall_{share:03d}", TRAINED) for share in SHARES}
    best = lowest(*(text[share] for share in MIXED))
    quarter = claim("Recall: one layer in four solves 8 pairs", near[25], at_least=0.97)
    whole = claim("Recall: attention alone solves 8 pairs", near[100], at_least=0.97)
    return Finding((
        claim("Text: one attention layer in four is better than none", difference(text[0], text[25]), at_least=0.0,
              what="bits a byte saved"),
        claim("Text: one attention layer in four is better than attention alone", difference(text[100], text[25]), at_least=0.0,
              what="bits a byte saved"),
        claim("Text: the best stack has both", difference(lowest(text[0], text[100]), best), at_least=0.0,
              what="bits a byte saved"),
        claim("Recall: no attention does not solve 8 pairs", near[0], at_most=0.4),
        quarter, whole,
        claim("Recall: no mixed stack is worse than attention alone",
              difference(lowest(*(near[share] for share in MIXED)), near[100]), at_least=-0.02, what="more accuracy",
              provided=whole),
    ))


STUDY = Study(
    name="attention_share",
    title="The share of attention in a stack of Mamba-2",
    question="At equal parameters, how does quality go with the share of attention layers, on text and on recall?",
    paper="Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space "
          "Duality, https://arxiv.org/abs/2405.21060",
    recipes=(*(f"text_{share:03d}" for share in SHARES), *(f"recall_{share:03d}" for share in SHARES)),
    finding=finding,
    options=replace(QUALITY, multiples=(1, 4), max_documents=4, eval_tokens=65_536),
    smoke={"text_*": ("task.max_documents=6", "task.held_out=0.5", "train.seq_len=16")},
    smoke_options={"max_documents": 2, "eval_tokens": 512},
)
