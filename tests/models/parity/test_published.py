"""``recipes/published``, made small: the logits and every gradient of transformers' model with the same weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="parity needs transformers")
from hybridtf.models.weights import assign_weights, canonical_tensors
from tests.models.parity.cases import ids
from tests.models.parity.published import PUBLISHED
from tests.models.parity.reference import logits_of, reference

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


@pytest.mark.parametrize("name", PUBLISHED)
def test_small_ones_equal_transformers(name: str) -> None:
    case = PUBLISHED[name]()
    theirs = reference(case.model, case.config, unit_offset=case.unit_offset)
    model = case.build()
    assign_weights(model, case.translated(canonical_tensors(theirs)), where="the reference")
    tokens = ids(2, 19, 1)
    want, got = logits_of(theirs, tokens), model(tokens).logits
    assert want.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    pick = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for logits in (want, got):
        (logits * pick).sum().backward()
    grads = case.translated({name: p.grad for name, p in theirs.named_parameters()})
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == grads.keys()
    for name, p in own.items():
        tiny = 1e-8 * float(grads[name].abs().max())
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-8, atol=tiny, msg=lambda m, n=name: f"{n}: {m}")
