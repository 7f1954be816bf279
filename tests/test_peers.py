"""How other people's references are taken: alone, with what they lack standing in, and without a trace."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.peers import peer


def test_a_package_that_was_taken_cannot_be_imported_by_others() -> None:
    module = peer("xlstm.blocks.slstm.layer")
    assert module is peer("xlstm.blocks.slstm.layer")
    assert not [name for name in sys.modules if name.partition(".")[0] == "xlstm"]
    assert importlib.util.find_spec("xlstm") is None


def test_what_stands_in_is_gone_afterwards_and_gives_only_what_it_was_given() -> None:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("local_attention", "einops")}
    module = peer("performer_pytorch.performer_pytorch", local_attention={}, axial_positional_embedding={})
    assert module.LocalAttention is None
    assert before.items() <= sys.modules.items()
    assert "local_attention" not in sys.modules
    with pytest.raises(TypeError):
        module.SelfAttention(8, causal=True, local_heads=1, heads=2)


@pytest.mark.parametrize("path", ["no_such_package.part", "no/such/file.py"])
def test_what_is_missing_is_said(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"is missing: make \.peers/\.installed"):
        peer(path)
