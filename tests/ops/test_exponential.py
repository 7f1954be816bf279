"""exp of exponents far below zero: right where it counts, 0 where it is left out, and the same gradients."""

from __future__ import annotations

import math

import pytest
import torch

from hybridtf.ops import exponential
from hybridtf.ops.exponential import LEAST, LOG2_E
from hybridtf.ops.ssd import ssd_chunked, ssd_reference

EXPONENTS = torch.linspace(-69.0, 0.0, 2001)
FORMS = {"exp": exponential.exp, "exp_": lambda x: exponential.exp_(x.clone())}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_is_exp_up_to_the_rounding_of_its_argument(form):
    found, wanted = form(EXPONENTS).double(), EXPONENTS.double().exp()
    allowed = (EXPONENTS.abs().double() + 2) * 2.0**-23
    assert ((found / wanted - 1).abs() <= allowed).all()
    assert form(torch.zeros(3)).tolist() == [1.0] * 3


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_hidden_or_forgotten_is_zero(form):
    low = LEAST / LOG2_E
    found = form(torch.tensor([-math.inf, -1000.0, -95.0, low - 0.01, low + 0.01, math.nan, 3.0]))
    assert found[:4].tolist() == [0.0] * 4
    assert found[4] > 2.0**-127
    assert found[5].isnan()
    torch.testing.assert_close(found[6], torch.tensor(3.0).exp())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_float64_keeps_every_digit(form):
    x = torch.linspace(-700, 0, 501, dtype=torch.float64)
    assert torch.equal(form(x), x.exp())


def test_gradients_are_the_results():
    x = torch.tensor([-math.inf, -95.0, -3.0, 0.0], requires_grad=True)
    y = exponential.exp(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_factors_are_those_of_float64_without_the_least():
    wide = torch.tensor([0.0, 2.0**-140, 2.0**-127, 2.0**-125, 1 / 3, 1.0], dtype=torch.float64)
    assert exponential.factors(wide, torch.float32).tolist() == [0.0, 0.0, 0.0, *wide[3:].float().tolist()]
    assert torch.equal(exponential.factors(wide, torch.float64), wide)


def test_a_mean_of_what_is_far_away_keeps_its_weights():
    """A query that meets the first key alone, 62 tokens and a decay of 0.3 each ago: its weight is all there is."""
    k = torch.zeros(1, 63, 1, 2)
    k[:, 0, :, 0] = 1.0
    k[:, 1:, :, 1] = 1.0
    q, ones = torch.tensor([1.0, 0.0]).expand(1, 63, 1, 2), torch.ones(1, 63, 1, 1)
    log_a = torch.full((1, 63, 1), math.log(0.3))
    found, wanted = (op(q, k, ones, log_a)[0] for op in (ssd_chunked, ssd_reference))
    assert wanted[0, -1, 0, 0] > 0
    torch.testing.assert_close(found / wanted, torch.ones_like(found), rtol=1e-4, atol=0)
