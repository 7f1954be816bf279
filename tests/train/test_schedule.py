import math

import pytest
import torch

from hybridtf.core import ConfigError
from hybridtf.train import lr_factor
from tests.train.runs import settings


def factors(total, **options):
    config = settings(steps=total, **options)
    return [lr_factor(config, step, total) for step in range(total)]


def test_cosine_values():
    got = factors(10, schedule="cosine", warmup=2, min_lr_fraction=0.1)
    fall = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert got == pytest.approx([0.5, 1.0, *fall], abs=1e-15)


def test_cosine_is_torchs_annealing():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=23, eta_min=0.2)
    expected = []
    for _ in range(23):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert factors(23, warmup=0, min_lr_fraction=0.2) == pytest.approx(expected, abs=1e-12)


def test_wsd_values():
    got = factors(10, schedule="wsd", warmup=2, decay_fraction=0.4, min_lr_fraction=0.0)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25], abs=1e-15)


def test_wsd_falls_all_the_way_at_most():
    got = factors(5, schedule="wsd", warmup=2, decay_fraction=1.0, min_lr_fraction=0.5)
    assert got == pytest.approx([0.5, 1, 1, 1 - 0.5 / 3, 1 - 1 / 3], abs=1e-15)


def test_constant_values():
    assert factors(5, schedule="constant", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_as_a_share():
    assert factors(20, schedule="constant", warmup=0.1)[:3] == [0.5, 1.0, 1.0]
    assert factors(20, schedule="constant", warmup=0)[0] == 1.0
    assert factors(1, schedule="cosine", warmup=0.02) == [1.0]


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup = 10 steps leave nothing of a run of 10 steps"):
        factors(10, warmup=10)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_never_zero_and_never_above_one(schedule, total):
    got = factors(total, schedule=schedule, warmup=0.3, min_lr_fraction=0.0)
    assert all(0 < factor <= 1 for factor in got)
