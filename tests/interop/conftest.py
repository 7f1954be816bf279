"""The published naming is written by transformers, which tells its progress."""

import pytest


@pytest.fixture(autouse=True)
def quiet_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
