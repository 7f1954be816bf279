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


BOUNDS = {
    "llama": 0.01, "gemma2": 0.02, "gemma3": 0.03, "recurrent_gemma": 0.015, "mamba": 0.02, "falcon_mamba": 0.03,
    "mamba2": 0.02, "bamba": 0.03,
    # Rounding lets near ties of the router go the other way.
    "mixtral": 0.08, "gpt_oss": 0.12, "jamba": 0.15,
}
"""Root mean square of the error by that of the logits."""


@torch.no_grad()
@pytest.mark.parametrize("name", BOUNDS)
def test_error_is_small_and_not_above_the_reference(name):
    pair = pair_of(name)
    exact, rounded = copy.deepcopy(pair.theirs), copy.deepcopy(pair.theirs).to(torch.bfloat16)
    for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
        wide.copy_(narrow)
    model = pair.case.build(dtype=torch.bfloat16)
    assign_weights(model, pair.case.translated(rounded.named_parameters()), where="the reference")
    tokens = ids(4, 31, 5)
    want = logits_of(exact, tokens)

    def error(logits: Tensor) -> float:
        return float((logits.double() - want).square().mean().sqrt() / want.square().mean().sqrt())

    ours, theirs = model(tokens).logits, rounded(input_ids=tokens, use_cache=False).logits
    assert ours.dtype == torch.bfloat16
    assert error(ours) < min(BOUNDS[name], 1.2 * error(theirs))
