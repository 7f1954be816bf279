"""The convolution that mixes a head's channels, against torch's grouped one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, Segments
from hybridtf.core.init import init_parameters
from hybridtf.nn import HeadConv

C = 6


def build(n_heads, d_conv):
    conv = HeadConv(BuildContext(d_model=C, param_dtype=torch.float64), n_heads, d_conv)
    init_parameters(conv, 3)
    return conv


@pytest.mark.parametrize(("n_heads", "d_conv"), [(1, 3), (2, 1), (3, 4), (6, 2)])
def test_equals_a_grouped_convolution_whose_padding_is_shifted_too(n_heads, d_conv):
    conv, x = build(n_heads, d_conv), torch.randn(2, 7, C, dtype=torch.float64)
    offset = torch.randn(C, dtype=torch.float64)

    def by_torch(rows):
        padded = F.pad(rows.transpose(1, 2), (d_conv - 1, 0)) + offset[:, None]
        return F.conv1d(padded, conv.weight, conv.bias, groups=n_heads).transpose(1, 2)

    got, state = conv(x, None, None, offset=offset)
    assert state is None
    torch.testing.assert_close(got, by_torch(x), rtol=0, atol=1e-13)
    packed = conv(x[:1], Segments.from_lengths([[3, 0, 4]]), None, offset=offset)[0]
    torch.testing.assert_close(packed, torch.cat([by_torch(x[:1, :3]), by_torch(x[:1, 3:])], 1), rtol=0, atol=1e-13)


def test_token_by_token_is_one_call():
    conv, x = build(2, 3), torch.randn(2, 5, C, dtype=torch.float64)
    state, parts = conv.init_state(2), []
    for i in range(5):
        y, state = conv(x[:, i : i + 1], None, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), conv(x, None, None)[0], rtol=0, atol=1e-14)
