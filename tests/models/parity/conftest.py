"""The pairs of models that the tests of this folder share."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("transformers"):
    from tests.models.parity.cases import CASES, Pair, pair_of

    @pytest.fixture(params=list(CASES))
    def pair(request) -> Pair:
        return pair_of(request.param)
