"""Findings of the field, made small: one file a study, recipes in ``recipes/studies/``."""

from __future__ import annotations

from importlib import import_module

from hybridtf.core import UnknownNameError, known_names
from hybridtf.studies.base import QUALITY, Study, StudyResult, StudyTask, run_study
from hybridtf.studies.claims import Claim, Finding, Measures, claim, combine, difference, highest, lowest

MODULES = (
    "induction", "recall", "state_tracking", "passkey", "selective_copying", "copying", "text_positions", "attention_share",
    "mad", "beyond_training", "one_stack",
)
"""The files of this room that hold a ``STUDY``, in the order in which they are listed."""


def studies() -> dict[str, Study]:
    """All studies by name, in order."""
    found = [import_module(f"hybridtf.studies.{module}").STUDY for module in MODULES]
    return {study.name: study for study in found}


def find_study(name: str) -> Study:
    """The study of a name; raises :class:`UnknownNameError` with the nearest."""
    known = studies()
    if name not in known:
        raise UnknownNameError(f"no study {name!r}. {known_names(name, known, 'hybridtf study list')}")
    return known[name]


__all__ = [
    "MODULES", "QUALITY", "Claim", "Finding", "Measures", "Study", "StudyResult", "StudyTask", "claim", "combine",
    "difference", "find_study", "highest", "lowest", "run_study", "studies",
]
