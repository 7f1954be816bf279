"""Recall of many keys (MQAR): attention solves it at any width, a fixed state as far as its bytes go, and one layer of
attention above a recurrence is enough (Arora et al., *Zoology* and *Based*)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridtf.bench.bootstrap import Floats
from hybridtf.bench.records import Record
from hybridtf.studies.base import Study
from hybridtf.studies.claims import Finding, Measures, Series, claim, combine, difference

TRAINED, FAR = "64 tokens, 8 pairs", "256 tokens, 32 pairs"
LENGTH = 1024
"""Tokens after which states are compared: those of a fixed size have reached it long before."""
FIXED = ("mamba2_n16", "mamba2_n64", "gla", "delta_net", "gated_delta_net", "rwkv7", "mlstm", "retnet", "based")
"""Recipes whose state does not grow; a window stops to grow too, but holds the last tokens alone."""
FEWEST = 8
"""A correlation over fewer mixers is not claimed."""


def finding(records: Sequence[Record]) -> Finding:
    """Attention and the pair of Mamba-2 and attention solve the trained size and the pair holds at four times the pairs;
    Mamba-2 with the small state does not, more state is better, and recall follows the bytes of the state."""
    found = Measures(records)
    hybrid = claim("Mamba-2 below position-free attention solves 8 pairs", found.quality("hybrid", TRAINED), at_least=0.97)
    attention = claim("Two layers of rotary attention solve 8 pairs", found.quality("attention", TRAINED), at_least=0.97)
    small, large = found.quality("mamba2_n16", TRAINED), found.quality("mamba2_n64", TRAINED)
    window = found.quality("window", TRAINED)
    return Finding((
        attention, hybrid,
        claim("The pair holds at 32 pairs in 256 tokens", found.quality("hybrid", FAR), at_least=0.9, provided=hybrid),
        claim("Rotary attention does not", found.quality("attention", FAR), at_most=0.6, provided=attention),
        claim("Mamba-2 with a state of 16 does not solve 8 pairs", small, at_most=0.4),
        claim("A state of 64 is better than one of 16", difference(large, small), at_least=0.02, what="more accuracy"),
        claim("A window of 16 tokens alone does not solve 8 pairs", window, at_most=0.4),
        claim("Among states of a fixed size, recall follows bytes", _correlations(found), at_least=0.5,
              what="rank correlation"),
    ))


def _correlations(found: Measures) -> Series:
    """Spearman's rank correlation of recall with the bytes of the state over the recipes of ``FIXED``, by seed."""
    sizes = {name: found.state_bytes(name, LENGTH) for name in FIXED if name in found.recipes}
    names = [name for name, size in sizes.items() if size is not None]
    if len(names) < FEWEST:
        return dict.fromkeys(found.seeds)
    bytes_of = [sizes[name] for name in names]
    return combine(lambda *recall: _spearman(recall, bytes_of), *(found.quality(name, TRAINED) for name in names))


def _spearman(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """The correlation of ranks, ties having their mean rank; 0 where one side is all the same."""
    a, b = (_ranks(np.array(values, dtype=np.float64)) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _ranks(values: Floats) -> Floats:
    """(n) ranks from 1, equal values sharing the mean of theirs."""
    less = (values[None] < values[:, None]).sum(1)
    same = (values[None] == values[:, None]).sum(1)
    ranks: Floats = less + (same + 1) / 2
    return ranks


STUDY = Study(
    name="recall",
    title="Recall against the bytes of the state",
    question="Which stacks say the value of every key again, and what does the size of their state have to do with it?",
    paper="Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models, https://arxiv.org/abs/2312.04927",
    recipes=("attention", "hybrid", "window", *FIXED),
    finding=finding,
)
