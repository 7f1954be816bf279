"""Every family over reference models in the published naming: the same scores, all our ways of calling, and back."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.core import Segments
from hybridtf.interop import export_checkpoint, import_checkpoint
from hybridtf.models.weights import read_weights
from tests.interop import tiny_oracles
from tests.interop.oracles import REWRITTEN, Oracle, names, oracle

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find
NAMES = names()
SHORT = 5


@functools.cache
def imported(name: str, seed: int = 0):
    return import_checkpoint(oracle(name, seed).folder, dtype=torch.float64)


def assert_near(got: Tensor, want: Tensor, one: Oracle, of: float = 1.0) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=one.tolerance * of)


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_the_reference(name, seed):
    one = oracle(name, seed)
    assert_near(imported(name, seed).model(one.ids).logits, one.want, one)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_decoding_packing_and_padding_equal_the_full_forward(name):
    model, one = imported(name).model, oracle(name)
    cannot = {law for module in model.modules() for law in getattr(module, "cannot", {})}
    first, second = one.ids[:1], one.ids[1:2, :SHORT]
    alone = model(second).logits[0]
    row = torch.cat([second, first], 1)
    packed = model(row, segments=Segments.from_lengths([[SHORT, first.shape[1]]])).logits[0]
    assert_near(packed, torch.cat([alone, one.want[0]]), one)
    for before in (0, 3, first.shape[1] - SHORT):
        real = torch.zeros(1, first.shape[1], dtype=torch.bool)
        real[:, before : before + SHORT] = True
        padded = torch.full_like(first, 2)
        padded[real] = second[0]
        mask = torch.cat([real, torch.ones_like(real)])
        logits = model(torch.cat([padded, first]), segments=Segments.from_mask(mask)).logits
        assert_near(logits[0][real[0]], alone, one)
        assert_near(logits[1], one.want[0], one)
    if "cut" in cannot:
        return
    for cuts in ((4, 5, 11), tuple(range(1, first.shape[1]))):
        state, parts = model.init_state(1, max_len=first.shape[1]), []
        for start, stop in zip((0, *cuts), (*cuts, first.shape[1]), strict=True):
            out = model(first[:, start:stop], state=state)
            state = out.state
            parts.append(out.logits[0])
        assert_near(torch.cat(parts), one.want[0], one)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_written(name, tmp_path):
    one = oracle(name)
    plain = import_checkpoint(one.folder)
    family = export_checkpoint(plain.model, tmp_path / "out", family=plain.family.model_type)
    assert family is plain.family
    before, after = read_weights(one.folder / "model.safetensors"), read_weights(tmp_path / "out" / "model.safetensors")
    if name not in REWRITTEN:
        assert set(after) <= set(before)
        for tensor in after:
            assert torch.equal(after[tensor], before[tensor]), tensor
    arch = tiny_oracles.ARCHS[name]
    options = {"attn_implementation": arch.attn} if arch.attn else {}
    loaded = tiny_oracles.hf_class(arch.model)
    if loaded._can_set_experts_implementation():
        options["experts_implementation"] = "eager"  # the grouped ones want widths that are multiples of 4
    theirs = loaded.from_pretrained(tmp_path / "out", dtype=torch.float32, **options)
    if arch.fixup is not None:
        arch.fixup(theirs, torch.Generator())
    got = tiny_oracles.main_output(tiny_oracles.run(theirs.eval(), **tiny_oracles.inputs(name), use_cache=False))
    torch.testing.assert_close(got.double(), one.want, rtol=0, atol=1e-4 * float(one.want.abs().max()))
