"""The parts of a rule, each walked by itself."""

from __future__ import annotations

from hybridtf.ops.block_sparse_attention.rule import SparseRule

PARTS = ("local", "dilated", "stride", "chosen")


def clauses_of(rule: SparseRule, part: str, marked: bool) -> tuple[str, ...]:
    """The clauses that are walked together, since their queries are grouped alike."""
    if part == "chosen":
        return ("chosen",)
    own = [name for name in rule.clauses if _part_of(rule, name) == part]
    return (*own, "marked") if marked and part == "local" else tuple(own)


def _part_of(rule: SparseRule, clause: str) -> str:
    if clause == "stride":
        return "stride" if rule.stride > 1 else "local"
    return "dilated" if clause == "window" and rule.dilation > 1 else "local"


def earlier(rule: SparseRule, part: str, marked: bool) -> tuple[str, ...]:
    """The clauses of the parts before ``part``."""
    return tuple(name for other in PARTS[: PARTS.index(part)] for name in clauses_of(rule, other, marked))
