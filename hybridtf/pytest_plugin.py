"""The option of ``pytest --pyargs hybridtf.testing``: loaded with every pytest run, so it imports nothing."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """``--hybridtf-plugin NAME``, which may be repeated."""
    parser.getgroup("hybridtf").addoption(
        "--hybridtf-plugin", action="append", default=[], metavar="NAME",
        help="Hold what this plugin registers to the contract (with --pyargs hybridtf.testing); all that are installed if "
        "not given. 'hybridtf' names the built-ins.",
    )
