"""The command line: ``hybridtf``. Thin, and quick to answer: what is heavy is imported by the command that needs it."""

from hybridtf.cli.app import app, main

__all__ = ["app", "main"]
