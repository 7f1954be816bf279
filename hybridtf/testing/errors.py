"""What a check says: a law that is broken, or why it does not apply."""

from __future__ import annotations


class ContractError(AssertionError):
    """A component breaks a law of its contract; the message says where, by how much, and what is asked of it."""


class NotApplicableError(Exception):
    """A check that says nothing about this component; the message says why."""


class DeclaredError(NotApplicableError):
    """A law that the component declares that it cannot keep, and does not."""
