"""torch.compile: right numbers, and no new graph for each layer or each step."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from tests.field.layers import CHOOSE, F64, every, hybrid, mixer, model, same


@every
def test_compiled_layers_give_the_numbers_of_eager_ones(name):
    """33 tokens over chunks of 16: outputs and gradients, traced ahead of time."""
    options = {"chunk_size": 16} if "chunk_size" in type(mixer(name).config).model_fields else {}
    layer = mixer(name, "compile", **options)
    x = torch.randn(2, 33, 16, dtype=F64, requires_grad=True)
    weight = torch.randn(2, 33, 16, dtype=F64)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
            y = function(x)[0]
            learned = [p for p in layer.parameters() if p.requires_grad]
            # An indexer is taught by its loss alone.
            found = torch.autograd.grad((y * weight).sum(), [x, *learned], materialize_grads=name in CHOOSE)
            results.append([y, *found])
    for a, b in zip(*results, strict=True):
        same(a, b, 1e-9)


@pytest.mark.parametrize("name", ["attention", "mamba2"])
@torch.no_grad()
def test_six_equal_layers_share_one_graph(name):
    net = model("a*6", {"a": name})
    counter = CompileCounter()
    x = torch.randn(2, 9, 16, dtype=F64)
    for block in net.stack.blocks():
        compiled = torch.compile(block, backend=counter, fullgraph=True)
        same(compiled(x, {}).x, block(x, {}).x)
    assert counter.frame_count == 1


@torch.no_grad()
def test_twenty_decode_steps_use_one_graph():
    net = hybrid("m a r m a r")
    counter = CompileCounter()
    ids = torch.randint(0, 17, (2, 25))
    want = net(ids).logits

    def step(tokens, state):
        out = net(tokens, state=state)
        return out.logits, out.state

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    state = net(ids[:, :5], state=net.init_state(2, 25)).state
    counts = []
    for t in range(5, 25):
        logits, state = compiled(ids[:, t : t + 1], state)
        same(logits, want[:, t : t + 1])
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1]
    assert counts[-1] <= 2
