"""The suite's own guards work: a guard that has come loose would let every other test pass for the wrong reason."""

import random
import warnings

import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(5),
        lambda: torch.empty(5, dtype=torch.bfloat16),
        lambda: torch.empty_like(torch.zeros(5, dtype=torch.float64)),
        lambda: torch.zeros(2).new_empty(5),
        lambda: torch.empty_strided((5,), (1,)),
    ],
    ids=["empty", "empty-bf16", "empty_like", "new_empty", "empty_strided"],
)
def test_uninitialised_memory_is_nan(make):
    assert make().isnan().all()


def test_uninitialised_integers_are_no_index():
    assert (torch.empty(5, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()


def test_one_thread():
    assert torch.get_num_threads() == 1


def test_every_test_starts_from_the_same_seeds():
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert random.random() == random.Random(0).random()


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="a stray warning"):
        warnings.warn("a stray warning", stacklevel=1)


@pytest.mark.gpu
def test_gpu_tests_run_on_a_gpu():
    x = torch.ones(3, device="cuda")
    assert float(x.sum()) == 3.0
