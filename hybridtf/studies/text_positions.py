"""Positions of attention on text beyond the trained length: rotary ones break, scalings move the break, biases and windows hold
(Press et al., *ALiBi*; Peng et al., *YaRN*; Yang et al., *RoPE to NoPE*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridtf.bench.records import Record
from hybridtf.studies.base import QUALITY, Study
from hybridtf.studies.claims import Finding, Measures, Series, claim, difference, lowest

MULTIPLES = (1, 2, 4, 8, 16, 32)
FAR = MULTIPLES[-1]
FLAT = 0.05
"""Bits a byte by which a stack that extrapolates may rise above those within the trained length."""
LEARNT = 3.39
"""Bits a byte: a model of pairs of bytes has 3.40 on this text."""
RESCALED = ("rope_pi", "rope_ntk", "rope_yarn")


def finding(records: Sequence[Record]) -> Finding:
    """Rotary attention breaks; NTK and YaRN, not tuned, move the break and interpolation spoils what was learnt; ALiBi and
    windows below one layer without positions stay flat; attention without positions alone does not."""
    found = Measures(records)

    def bits(name: str, multiple: int) -> Series:
        return found.beyond(name, multiple)

    def rise(name: str, multiple: int = FAR) -> Series:
        return difference(bits(name, multiple), bits(name, 1))

    learnt = claim("Rotary attention learns more than pairs of bytes", bits("rope", 1), at_most=LEARNT, what="bits a byte")
    hybrid = "Windows with rotary positions below one layer without positions"
    return Finding((
        learnt,
        claim("Rotary attention breaks at 16 times the trained length", rise("rope", 16), at_least=1.5, what="bits more",
              provided=learnt),
        claim("Interpolation without tuning spoils the trained length", difference(bits("rope_pi", 1), bits("rope", 1)),
              at_least=0.5, what="bits more", provided=learnt),
        claim("NTK-aware scaling without tuning helps at 4 times", difference(bits("rope", 4), bits("rope_ntk", 4)),
              at_least=0.1, what="bits saved", provided=learnt),
        claim("YaRN without tuning helps at 32 times", difference(bits("rope", FAR), bits("rope_yarn", FAR)),
              at_least=0.5, what="bits saved", provided=learnt),
        claim("YaRN is the best scaling at 32 times",
              difference(lowest(bits("rope_pi", FAR), bits("rope_ntk", FAR)), bits("rope_yarn", FAR)),
              at_least=0.0, what="bits saved", provided=learnt),
        claim("ALiBi is flat to 32 times", rise("alibi"), at_most=FLAT, what="bits more"),
        claim("Attention without positions alone is not", rise("nope"), at_least=0.2, what="bits more"),
        claim("Windows with rotary positions alone are flat to 32 times", rise("window"), at_most=FLAT, what="bits more"),
        claim(f"{hybrid} are flat to 32 times", rise("window_nope"), at_most=FLAT, what="bits more"),
        claim(f"{hybrid} are no worse than rotary attention within the trained length",
              difference(bits("window_nope", 1), bits("rope", 1)), at_most=FLAT, what="bits more", provided=learnt),
    ))


STUDY = Study(
    name="text_positions",
    title="Positions of attention on text, to 32 times the trained length",
    question="Trained on 128 bytes, what do the positions of attention do to the loss up to 4,096?",
    paper="Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, https://arxiv.org/abs/2309.00071",
    recipes=("rope", "alibi", "nope", "window", "window_nope"),
    untuned=dict.fromkeys(RESCALED, "rope"),
    finding=finding,
    options=replace(QUALITY, multiples=MULTIPLES, max_documents=8, eval_tokens=65_536),
    smoke={"*": ("task.max_documents=6", "task.held_out=0.5", "train.seq_len=16")},
    smoke_options={"max_documents": 2, "eval_tokens": 512},
)
