from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, LengthError
from hybridtf.nn import LearnedPositionConfig, NoPositionConfig, RopeConfig


def rope(head_dim=8, **options):
    return RopeConfig(**options).build(BuildContext(d_model=head_dim))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_is_a_rotation_in_the_complex_plane(interleaved, fraction):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 100, 3, 0]])
    width = int(8 * fraction)
    turned, passed = x[..., :width], x[..., width:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous())
    angle = positions[..., None, None] * 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    z = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle))
    want = z.flatten(-2) if interleaved else z.transpose(-1, -2).flatten(-2)
    got = rope(fraction=fraction, interleaved=interleaved)(x, positions)
    torch.testing.assert_close(got, torch.cat([want, passed], -1))


def test_scores_depend_on_distance_alone():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    turn = rope()
    at = lambda a, b: (turn(q, torch.tensor([[a]])) * turn(k, torch.tensor([[b]]))).sum()  # noqa: E731
    torch.testing.assert_close(at(5, 2), at(1_000_005, 1_000_002), rtol=0, atol=1e-8)


def test_far_positions_survive_a_cast_of_the_model():
    x = torch.ones(1, 2048, 1, 32)
    positions = torch.arange(2048)[None]
    exact = rope(32)(x.double(), positions)
    half = rope(32).to(torch.bfloat16)(x.bfloat16(), positions)
    assert float((half.double() - exact).abs().max()) < 0.02
    far = torch.tensor([[1_000_000, 1_000_001]])
    single = rope(32)(x[:, :2], far).double()
    assert float((single - rope(32)(x[:, :2].double(), far)).abs().max()) < 1e-6


@pytest.mark.parametrize(("head_dim", "fraction"), [(5, 1.0), (6, 0.5), (2, 0.5)])
def test_odd_rotated_widths_are_refused(head_dim, fraction):
    with pytest.raises(ConfigError, match="rope rotates pairs"):
        rope(head_dim, fraction=fraction)


def test_learned_table_adds_and_refuses():
    table = LearnedPositionConfig().build(BuildContext(d_model=4, max_seq_len=3))
    x = torch.zeros(1, 3, 4)
    torch.testing.assert_close(table(x, torch.tensor([[2, 0, 1]]))[0], table.table[[2, 0, 1]])
    with pytest.raises(LengthError, match="4 tokens"):
        table(x, torch.tensor([[3, 0, 1]]))
    assert NoPositionConfig().build(BuildContext(d_model=4)) is None
