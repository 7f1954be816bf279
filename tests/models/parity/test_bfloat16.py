"""Models in bfloat16, ours and the reference's, both held against strict float64 with the same rounded weights."""

from __future__ import annotations

import copy

import pytest
import torch

from hybridtf.models.weights import assign_weights

pytest.importorskip("transformers", reason="parity needs transformers")
from tests.models.parity.cases import ids, pair_of  # noqa: E402
from tests.models.parity.reference import logits_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "recurrent_gemma", "mamba", "falcon_mamba", "mamba2", "bamba","jamba","mixtral","gpt_oss"])
def test_rounding_stays_small(name):
    pair = pair_of(name)
    exact, rounded = copy.deepcopy(pair.theirs), copy.deepcopy(pair.theirs).to(torch.bfloat16)
    for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
        p.copy_(q)
    model = pair.case.build(dtype=torch.bfloat16)
    assign_weights(model, pair.case.translated(rounded.named_parameters()), where="the reference")
    tokens = ids(4, 31, 5)
    want = logits_of(exact, tokens)
    theirs = rounded(input_ids=tokens, use_cache=False).logits
    got = model(tokens).logits
    e = lambda x: float((x.double()-want).square().mean().sqrt()/want.square().mean().sqrt())
    print(name, got.dtype, e(got), e(theirs), float((got.double()-want).abs().max()/want.abs().max()), float((theirs.double()-want).abs().max()/want.abs().max()))
