"""Windows and recurrences let the loss fall on beyond the trained length; one full rotary attention layer breaks a hybrid, but
for the lowest (De et al., *Griffin*; Ren et al., *Samba*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridtf.bench.records import Record
from hybridtf.studies.base import QUALITY, Study
from hybridtf.studies.claims import Finding, Measures, Series, claim, difference

MULTIPLES = (1, 2, 4, 8, 16, 32)
FAR = MULTIPLES[-1]
BREAKS = 0.1
"""Bits a byte. Samba's table at four times: 13.66 against 10.29, 0.41 bits a token of about four bytes."""


def finding(records: Sequence[Record]) -> Finding:
    """Of windows with a recurrence the mean loss from the start of a document is lower at 32 times the trained length than
    within it; a full rotary layer above a recurrence breaks at 4 times, the lowest one and one without positions do not."""
    found = Measures(records)

    def gained(name: str, multiple: int) -> Series:
        """Bits a byte that the mean from the start to this multiple lies above that within the trained length."""
        return difference(found.beyond(name, multiple, field="cumulative"), found.beyond(name, 1, field="cumulative"))

    def above(name: str, multiple: int) -> Series:
        """Rise since the trained length beyond the rise of ``samba`` on the same bytes: some stretches of text are harder."""
        return difference(_rise(found, name, multiple), _rise(found, "samba", multiple))

    later = claim("A full rotary layer between layers of Mamba-2 breaks at 4 times", above("rope_later", 4), at_least=BREAKS,
                  what="bits above samba")
    return Finding((
        claim("Samba-like: the loss is lower at 4 times the trained length", gained("samba", 4), at_most=0.0, what="bits more"),
        claim("Samba-like: and at 32 times", gained("samba", FAR), at_most=0.0, what="bits more"),
        claim("Griffin-like: the loss is lower at 4 times the trained length", gained("griffin", 4), at_most=0.0,
              what="bits more"),
        claim("Griffin-like: and at 32 times", gained("griffin", FAR), at_most=0.0, what="bits more"),
        later,
        claim("It is worse at 32 times", difference(above("rope_later", FAR), above("rope_later", 4)), at_least=BREAKS,
              what="bits more", provided=later),
        claim("As the lowest layer it does not break at 4 times", above("rope_first", 4), at_most=BREAKS,
              what="bits above samba"),
        claim("The same layer without positions does not break at 32 times", above("nope_later", FAR), at_most=BREAKS,
              what="bits above samba"),
    ))


def _rise(found: Measures, name: str, multiple: int) -> Series:
    return difference(found.beyond(name, multiple), found.beyond(name, 1))


STUDY = Study(
    name="beyond_training",
    title="Windows and recurrences beyond the trained length",
    question="Does the loss keep falling beyond the trained length, and which single layer of full attention breaks that?",
    paper="Ren et al., Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language Modeling, "
          "https://arxiv.org/abs/2406.07522",
    recipes=("samba", "griffin", "rope_later", "rope_first", "nope_later"),
    finding=finding,
    options=replace(QUALITY, multiples=MULTIPLES, max_documents=8, eval_tokens=65_536),
    smoke={"*": ("task.max_documents=6", "task.held_out=0.5", "train.seq_len=16")},
    smoke_options={"max_documents": 2, "eval_tokens": 512},
)
