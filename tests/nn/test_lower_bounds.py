"""Lower bounds over depth against the formula of the published code, and the gate under them at its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtf.core import BuildContext
from hybridtf.core.init import init_parameters
from hybridtf.mixers import HGRN2Config, HGRNConfig
from hybridtf.nn import LowerBounds, log_forget
from hybridtf.testing import NotApplicableError, Subject, laws_for, run_law


def parts(n_layers: int, width: int = 3) -> list[LowerBounds]:
    """As the composer builds them: each is told what was written before."""
    made: list[LowerBounds] = []
    for i in range(n_layers):
        seen = frozenset(name for part in made for name in part.writes)
        ctx = BuildContext(d_model=width, layer_idx=i, n_layers=n_layers, edges=seen, param_dtype=torch.float64)
        made.append(LowerBounds(ctx, "test"))
    return made


def test_one_table_gives_every_layer_its_bound() -> None:
    owner, *later = parts(4)
    assert [part.table is None for part in later] == [True] * 3
    table = torch.randn(4, 3, dtype=torch.float64)
    owner.table.data.copy_(table)
    x = torch.zeros(2, 5, 7)
    bound, edges = owner(x, None)
    assert bound is None
    assert sorted(edges) == sorted(owner.writes)
    shares = table.softmax(0)
    expected = shares.cumsum(0) - shares[0]
    for i, part in enumerate(later, 1):
        mine, written = part(x, {name: edges[name] for name in part.reads})
        assert not written
        assert mine.shape == (2, 5, 3)
        torch.testing.assert_close(mine, expected[i].expand(2, 5, -1), rtol=1e-12, atol=1e-12)


def test_alone_or_last_there_is_no_table() -> None:
    for layer, n_layers in ((0, 1), (3, 4), (7, 1)):
        part = LowerBounds(BuildContext(d_model=3, layer_idx=layer, n_layers=n_layers), "test")
        assert not list(part.parameters())
        assert part.reads == part.writes == ()


def test_a_table_starts_even_and_kinds_of_gates_do_not_share_one() -> None:
    owner = parts(3)[0]
    init_parameters(owner, 0)
    bounds = owner(torch.zeros(1, 1, 3), None)[1]
    values = [float(bounds[name][0, 0, 0].detach()) for name in owner.writes]
    assert values == pytest.approx([1 / 3, 2 / 3])
    ctx = BuildContext(d_model=3, layer_idx=1, n_layers=3, edges=frozenset(owner.writes))
    assert LowerBounds(ctx, "test").reads
    assert LowerBounds(ctx, "other").writes


def test_the_gate_is_exact_and_has_gradients_at_its_limits() -> None:
    f = torch.randn(50, dtype=torch.float64) * 5
    bound = torch.rand(50, dtype=torch.float64)
    torch.testing.assert_close(log_forget(f, bound).exp(), bound + (1 - bound) * f.sigmoid(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_forget(f, None).exp(), f.sigmoid(), rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.float64):
        f = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], dtype=dtype, requires_grad=True)
        for value in (0.0, 1e-30, 0.5, 1.0):
            bound = torch.full((5,), value, dtype=dtype, requires_grad=True)
            log_a = log_forget(f, bound)
            assert log_a.isfinite().all()
            assert (log_a <= 0).all()
            for grad in torch.autograd.grad(log_a.sum(), (f, bound)):
                assert grad.isfinite().all()
    near_one = torch.tensor([8.0, 12.0, 15.0])
    exact = log_forget(near_one.double(), torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(log_forget(near_one, torch.full((3,), 0.5)).double(), exact, rtol=1e-6, atol=0)


class InAStack(Subject):
    """A layer of a stack of three; with bounds to read, the second."""

    bounds: frozenset[str] = frozenset()

    def context(self, **changes: Any) -> BuildContext:
        return super().context(**{"n_layers": 3, "layer_idx": int(bool(self.bounds)), "edges": self.bounds, **changes})


LAWS = [law for law in laws_for("mixers") if law not in ("config", "kernels", "compile")]
"""Those that the place in a stack has a say in; compiling takes long, and is shown of one layer."""


@pytest.mark.parametrize(
    ("config_cls", "law"),
    [*((cls, law) for cls in (HGRNConfig, HGRN2Config) for law in LAWS), (HGRN2Config, "compile")],
    ids=lambda value: value if isinstance(value, str) else value.type_name(),
)
def test_layers_that_write_and_read_bounds_keep_the_laws(config_cls: type[HGRNConfig | HGRN2Config], law: str) -> None:
    owner = InAStack("mixers", config_cls.tiny())
    written = owner.build_plain().writes

    class Later(InAStack):
        bounds = frozenset(written)

    later = Later("mixers", config_cls.tiny())
    assert later.build_plain().reads == written[:1]
    for subject in (owner, later):
        try:
            run_law(subject, law)
        except NotApplicableError as reason:
            pytest.skip(str(reason))
