"""No option of a case is idle: set back to its default it shows in the logits, so parity says something about each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridtf.core import HybridTFError
from hybridtf.models import LanguageModelConfig
from hybridtf.models.weights import assign_weights, canonical_tensors

pytest.importorskip("transformers", reason="parity needs transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find

SAME_RESULT = {"chunk_size", "scores"}
"""Options that change the way, not the result: a softmax over the chosen experts is one over all of them, renormalised."""


def option_paths(table: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a nest of tables; ``type`` is what the others belong to."""
    for key, value in table.items():
        if key != "type" and key not in SAME_RESULT:
            yield (*path, key)
            if isinstance(value, dict):
                yield from option_paths(value, (*path, key))


def without(table: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(table)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


@torch.no_grad()
def test_every_option_shows(pair):
    whole = pair.case.language_model()
    arguments = {"vocab_size": whole.vocab_size, "d_model": whole.d_model, **pair.case.ours, "head": pair.case.head_table()}
    weights = canonical_tensors(pair.model)
    seen = 0
    for path in option_paths(arguments):
        try:
            config = LanguageModelConfig(**without(arguments, path))
            if config == whole:
                continue  # it was said, and is the default
            model = pair.case.build(config)
            assign_weights(model, weights, where="the pair")
        except HybridTFError:
            continue  # not even the same parameters
        change = float((model(pair.long).logits[0] - pair.want_long).abs().max())
        assert change > 1e-6, f"{'.'.join(path)} makes a difference of {change}"
        seen += 1
    assert seen
