from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, active
from hybridtf.nn.ramps import layer_depth


def test_depth_of_layers_and_of_one_beyond_them():
    assert [layer_depth(BuildContext(d_model=4, layer_idx=i, n_layers=3)) for i in (0, 2)] == [(0.0, 1.0), (1.0, 1 - 2 / 3)]
    assert layer_depth(BuildContext(d_model=4)) == (0.0, 1.0)
    assert layer_depth(BuildContext(d_model=4, layer_idx=5)) == layer_depth(BuildContext(d_model=4, layer_idx=5, n_layers=6))


@pytest.mark.parametrize("name", ["rwkv4", "rwkv5", "rwkv6", "rwkv7", "slstm", "lightning_attention"])
def test_a_layer_alone_starts_as_the_last_of_its_stack(name):
    config = active()["mixers"].get(name).tiny()
    alone, last = (config.build(BuildContext(d_model=16, layer_idx=5, **more)) for more in ({}, {"n_layers": 6}))
    for (key, p), q in zip(alone.named_parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=key)
    x = torch.randn(1, 9, 16)
    assert alone(x)[0].isfinite().all()
    torch.testing.assert_close(alone(x)[0], last(x)[0], rtol=0, atol=0)
