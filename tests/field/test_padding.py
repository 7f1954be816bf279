"""Pad tokens must leave no trace in recurrent states, convolution windows and caches."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import Segments
from hybridtf.nn import ShortConv
from hybridtf.testing.compare import close_rows, close_states
from tests.field.layers import CONVOLVED, F32, F64, config, every, greedy, mixer, model, packed_ids, same, solo, steps


@every
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-10), (F32, 1e-5)], ids=["float64", "float32"])
@torch.no_grad()
def test_pads_in_the_middle_of_a_row_do_not_let_the_memory_decay(name, dtype, tol):
    layer = mixer(name, "segment", dtype=dtype)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]]).bool()
    x = torch.randn(1, 11, 16, dtype=dtype)
    y, state = layer(x, segments=Segments.from_mask(mask), state=layer.init_state(1))
    want, want_state = solo(layer, x[mask][None])
    same(y[mask][None], want, tol)
    close_states(state, want_state, tol=tol, what="final state")


@every
@torch.no_grad()
def test_decoding_goes_on_from_the_last_real_token_of_a_right_padded_row(name):
    layer = mixer(name, "segment", "cut")
    x, later = torch.randn(2, 12, 16, dtype=F64), torch.randn(2, 3, 16, dtype=F64)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    _, state = layer(x, segments=Segments.from_mask(mask), state=layer.init_state(2))
    _, alone = solo(layer, x[:1, :7])
    close_rows(state, 0, alone, 0, tol=1e-10, what="after the prefill")
    y, state = steps(layer, later, state)
    want, alone = steps(layer, later[:1], alone)
    same(y[:1], want)
    close_rows(state, 0, alone, 0, tol=1e-10, what="after three steps")


@pytest.mark.parametrize("name", CONVOLVED)
@torch.no_grad()
def test_left_padded_prompts_generate_what_each_generates_alone(name):
    """Silu of the convolution's bias, at pads, must not reach the recurrence; the pad's id is a token like any other."""
    options = {"d_conv": 4, "conv_bias": True}
    options = {key: value for key, value in options.items() if key in type(config(name)).model_fields}
    net = model("a*2", {"a": {**config(name).to_dict(), **options}})
    for block in net.stack.blocks():
        for part in block.mixer.modules():
            if isinstance(part, ShortConv) and part.bias is not None:
                part.bias.fill_(0.5)
    prompts = [torch.randint(0, 17, (n,)) for n in (4, 9, 12)]
    ids, segments = packed_ids(prompts, left=True)
    logits = net(ids, segments=segments).logits
    for i, prompt in enumerate(prompts):
        same(logits[i, 12 - len(prompt) :], net(prompt[None]).logits[0])
    assert greedy(net, ids, 5, segments) == [greedy(net, prompt[None], 5)[0] for prompt in prompts]
