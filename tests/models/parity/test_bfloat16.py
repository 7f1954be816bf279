"""Models in bfloat16, ours and the reference's, both held against strict float64 with the same rounded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hybridtf.models.weights import assign_weights

pytest.importorskip("transformers", reason="parity needs transformers")
from tests.models.parity.cases import ids, pair_of
from tests.models.parity.reference import logits_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


NAMES = [
    "llama", "gemma2", "gemma3", "recurrent_gemma", "mamba", "falcon_mamba", "mamba2", "bamba", "mixtral", "gpt_oss", "jamba",
    "granitemoehybrid",
]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_error_is_small_and_not_above_the_reference(name):
    pair = pair_of(name)
    exact, rounded = copy.deepcopy(pair.theirs), copy.deepcopy(pair.theirs).to(torch.bfloat16)
    for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
        wide.copy_(narrow)
    model = pair.case.build(dtype=torch.bfloat16)
    assign_weights(model, pair.case.translated(dict(rounded.named_parameters())), where="the reference")
    tokens = ids(4, 31, 5)
    want = logits_of(exact, tokens)

    def error(logits: Tensor) -> float:
        """Of the median token: rounding lets near ties of a router go the other way, at few tokens."""
        by_token = (logits.double() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
        return float(by_token.median())

    ours, theirs = model(tokens).logits, rounded(input_ids=tokens, use_cache=False).logits
    assert ours.dtype == torch.bfloat16
    assert error(ours) < min(0.04, 1.1 * error(theirs))
