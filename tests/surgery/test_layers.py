"""Which layers are meant."""

from __future__ import annotations

import pytest

from hybridtf.core import ConfigError
from hybridtf.surgery import parse_layers


@pytest.mark.parametrize(("text", "layers"), [
    ("all", (0, 1, 2, 3, 4, 5)), ("1,3, 5", (1, 3, 5)), ("2-4", (2, 3, 4)), ("every 2", (0, 2, 4)),
    ("every 2 from 1", (1, 3, 5)), ("0, every  3  from 2, 3 - 3", (0, 2, 3, 5)), ("4,4", (4,)),
])
def test_words(text, layers):
    assert parse_layers(text, 6) == layers


@pytest.mark.parametrize(("text", "why"), [
    ("6", "the model has layers 0 to 5, and not all of these"),
    ("2-99999999999999", "layers 0 to 5, and not all of these"),
    ("4-2", "'4-2' is none of"), ("every 0", "'every 0' is none of"), ("-1", "'-1' is none of"), ("", "'' is none of"),
    ("1,,2", "'' is none of"), ("odd", "'odd' is none of"), ("every 2 from 9", "names none of the layers 0 to 5"),
])
def test_what_cannot_be(text, why):
    with pytest.raises(ConfigError, match=why):
        parse_layers(text, 6)
