"""Arithmetic in low precision: decays, states under autocast, features."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import Fixed, leaves
from tests.field.layers import CHOOSE, F32, F64, every, hybrid, mixer


@torch.no_grad()
def test_the_decay_is_not_exponentiated_in_the_precision_of_its_parameter():
    """Rates 1 to 16, steps of 0.05, an impulse 64 tokens ago; only A_log is bfloat16."""
    options = {"n_heads": 16, "n_groups": 1, "head_dim": 2, "d_state": 3, "d_conv": 1, "conv_bias": False}
    layer = mixer("mamba2", dtype=F32, **options)
    layer.A_log.data = torch.arange(1.0, 17.0).log().to(torch.bfloat16)
    layer.dt_bias.fill_(math.log(math.expm1(0.05)))
    layer.in_proj.weight[-16:] = 0.0  # the step does not depend on the input
    wide = mixer("mamba2", dtype=F64, **options)
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.zeros(1, 64, 16)
    x[:, 0] = torch.randn(16)
    state, exact = (m(z, state=m.init_state(1))[1]["ssm"]["S"] for m, z in ((layer, x), (wide, x.double())))
    assert exact.abs().amin((0, 2, 3)).min() > 0
    assert float(((state.double() - exact) / exact).abs().max()) < 1e-3
    first = wide(x[:, :1].double(), state=wide.init_state(1))[1]["ssm"]["S"]
    left = torch.exp(-wide.A_log.exp() * F.softplus(wide.dt_bias) * 63)
    torch.testing.assert_close(exact, first * left[:, None, None], rtol=1e-9, atol=0)


def dtypes(state):
    return [value.dtype for leaf in leaves(state) for value in leaf.data.values()]


@torch.no_grad()
def test_a_hybrid_decodes_under_autocast():
    """float32 parameters; the dtypes of a state are fixed when it is made: recurrences float32, the rest as computed."""
    net, ids = hybrid(dtype=F32), torch.randint(0, 17, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = net(ids).logits
        state = net.init_state(2, 9)
        made = dtypes(state)
        out = net(ids[:, :5], state=state)
        got = [out.logits]
        for t in range(5, 9):
            out = net(ids[:, t : t + 1], state=out.state)
            got.append(out.logits)
            assert dtypes(out.state) == made
    assert float((torch.cat(got, 1) - want).abs().max()) < 2e-2


GATES = ("beta", "decay")
"""What is held of a token beside its keys and values, and added up."""


@every
@torch.no_grad()
def test_a_half_precision_layer_keeps_its_recurrent_state_in_float32(name):
    layer = mixer(name, dtype=torch.bfloat16)
    made = layer.init_state(1)
    _, state = layer(torch.randn(1, 7, 16, dtype=torch.bfloat16), state=made)
    assert dtypes(state) == dtypes(layer.init_state(1))
    for leaf in leaves(state):
        for key, value in leaf.data.items():
            if not value.is_floating_point():
                continue
            if key in GATES:
                assert value.dtype in (F32, torch.float64)
            elif not isinstance(leaf, Fixed) or key == "window":
                assert value.dtype == torch.bfloat16
            elif key != "last":  # a token, or what was said last
                assert value.dtype == F32


HALF = 2e-2
"""How far half precision may be from float64 over 4096 tokens, relative to all of the output."""

WIDER: dict[str, tuple[float, str]] = {
    "differential_attention": (3e-2, "one softmax less the other leaves little of both, which is then normalised"),
    "path_attention": (4e-2, "the reflections of all tokens between a query and a key are multiplied into their score"),
    "lora": (3e-2, "attention over adapted projections, each of which is rounded twice"),
    "talking_heads": (2.5e-2, "scores are mixed over heads before and after the softmax"),
    "tiled_attention": (2.5e-2, "a window of few tokens, over which little averages out"),
}
"""Mixers whose bfloat16 needs more, and why."""


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_sums_over_4096_tokens_stay_finite_and_right_in_half_precision(name, dtype):
    """Inputs of deviation 3; in one call, and token by token at the end of it."""
    layer, wide = mixer(name, "cut", dtype=F32), mixer(name, dtype=F64)
    layer.to(dtype)
    wide.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    x = (3 * torch.randn(1, 4096, 16)).to(dtype)
    y, state = layer(x[:, :4088], state=layer.init_state(1))
    later = []
    for t in range(4088, 4096):
        out, state = layer(x[:, t : t + 1], state=state)
        later.append(out)
    got, want = torch.cat([y, *later], 1).double(), wide(x.double())[0]
    assert got.isfinite().all()
    if name in CHOOSE:
        pytest.skip("rounded scores choose otherwise")
    tol = WIDER[name][0] if dtype == torch.bfloat16 and name in WIDER else HALF
    assert float((got - want).norm() / want.norm()) < tol
    assert float((got - want)[:, 4088:].norm() / want[:, 4088:].norm()) < tol
