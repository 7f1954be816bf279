"""Every gradient of every family equal to the reference's: one loss, backward in float64, read through the family's links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.interop import import_checkpoint
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModel
from hybridtf.models.weights import canonical_tensors
from tests.interop.gradients import loss_of, without_link, write_gradients
from tests.interop.oracles import Oracle, names, oracle

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find

QUICK = ("jamba", "zamba2", "kimi_linear", "deepseek_v4", "rwkv@rescale")
"""Those of the default suite: shared layers, split convolutions, choices without a gradient, weights that are halved."""

ROUNDING = 1e-13
"""Of the largest gradient of a model: what is smaller is none."""

WITHOUT: dict[str, str] = {
    r"\.indexer\.": "it chooses tokens or blocks, and its scores go nowhere else",
    r"\.k_proj\.bias$": "without positions it moves all scores of a query alike",
    r"_message\.query$": "it weighs the states of a pass against each other; with one state (inkling2_loop) there is no other",
}
"""Trained tensors of ours that may have no gradient, and why."""


def gradients(model: LanguageModel, one: Oracle) -> dict[str, Tensor]:
    """Ours of the same loss, by canonical name; zero where there is none."""
    loss_of(model(one.ids).logits, one.ids).backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in numbers(model).items()}


def numbers(model: LanguageModel) -> dict[str, Tensor]:
    """What could be trained: all but tables of whole numbers."""
    return {name: x for name, x in canonical_tensors(model).items() if x.is_floating_point()}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names()])
def test_gradients_equal_the_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, followed = oracle(name), []
    total = write_gradients(one, tmp_path)
    read = WeightMap.read
    with monkeypatch.context() as patch:
        patch.setattr(WeightMap, "read", lambda links, x, where: followed.append((links, x)) or read(links, x, where))
        want = numbers(import_checkpoint(tmp_path).model)
    model = import_checkpoint(one.folder, dtype=torch.float64).model
    got = gradients(model, one)
    assert got.keys() == want.keys()
    nothing = ROUNDING * max(float(x.abs().max()) for x in want.values())
    for key, x in want.items():
        near = 10 * one.tolerance * float(x.abs().max()) + nothing
        torch.testing.assert_close(got[key], x.detach(), rtol=0, atol=near, msg=lambda m, key=key: f"{key}: {m}")
    assert without_link(*followed[0], nothing) == [], "the reference trains what has no link"
    silent = {key for key, x in want.items() if not float(x.abs().max()) > nothing}
    held = {key for key, x in numbers(model).items() if not x.requires_grad}
    unsaid = [key for key in silent - held if not any(re.search(pattern, key) for pattern in WITHOUT)]
    assert not unsaid, f"no gradient to compare: {unsaid}"
    assert held <= silent, f"trained by the reference alone: {held - silent}"
    ours = sum(float(x.square().sum()) for x in got.values())
    assert ours == pytest.approx(total, rel=20 * one.tolerance), "the reference trains what its checkpoints do not hold"


def test_a_small_gradient_without_a_link_is_told_by_name() -> None:
    links = WeightMap({"a": torch.Size([2])})
    links.same("a", "x")
    links.passed_over("aside.")
    links.unused("filler", (1,))
    links.copied("y", "x")
    tensors = {name: torch.full((2,), 1e-6) for name in ("x", "y", "aside.z", "filler")}
    links.check_names(tensors, "here")
    assert without_link(links, tensors, 1e-7) == ["aside.z", "filler"]
    assert without_link(links, tensors, 1e-5) == []
