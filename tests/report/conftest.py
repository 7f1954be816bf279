"""What several tests read and none changes."""

from pathlib import Path

import pytest

from hybridtf.report import write_report
from tests.report import sample


@pytest.fixture(scope="session")
def wide_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all sample records, as a file."""
    return write_report(sample.wide_records(), tmp_path_factory.mktemp("page") / "report.html", "Four recipes")
