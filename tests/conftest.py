"""What holds for every test: one thread, fixed seeds, uninitialised memory is NaN, no network, gpu tests skipped."""

import gc
import importlib.util
import os
import random
import re
import sys
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# Property tests are the same on every run and are not judged by the clock of a shared machine. Without hypothesis the
# others still run: a GPU machine may have torch and pytest alone.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "hybridtf", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    settings.load_profile("hybridtf")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of cycles need not walk all of it again in every test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


COMPILES = re.compile("compile|graph|well_formed")
"""In the name of a test that runs torch's compiler, or a part of it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if COMPILES.search(item.name):  # a tracer of lines follows the compiler too, and takes as long again
            item.add_marker("no_cover")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU (torch.cuda.is_available() is false)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts alike, whatever ran before it.

    torch fills what ``torch.empty`` and its kin return with NaN (integers: the largest value) while deterministic
    algorithms are asked for; on a CPU this changes no other result. On a GPU it would choose other kernels, so tests
    marked ``gpu`` run without it.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(request.node.get_closest_marker("gpu") is None, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:  # compiled code of one test must not use up the recompile limit of the next
        torch._dynamo.reset()
