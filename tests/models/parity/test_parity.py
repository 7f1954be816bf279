"""Whole models equal to transformers' with the same weights, in strict float64: logits, every gradient, every way to call."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import Tensor

from hybridtf.core import BuildContext, Segments
from hybridtf.models.weights import load_weights, save_weights
from hybridtf.recipe import parse_recipe, to_toml

pytest.importorskip("transformers", reason="parity needs transformers")
from tests.models.parity.cases import LONG, SHORT, ids
from tests.models.parity.reference import logits_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_logits_and_gradients(pair):
    tokens = ids(3, 23, 3)
    pair.theirs.zero_grad()
    pair.model.zero_grad()
    want = logits_of(pair.theirs, tokens)
    got = pair.model(tokens).logits
    assert_same(got, want)
    probe = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    (want * probe).sum().backward()
    (got * probe).sum().backward()
    grads = pair.case.translated({name: p.grad for name, p in pair.theirs.named_parameters()})
    own = {name: p for name, p in pair.model.named_parameters() if p.requires_grad}
    assert own.keys() == grads.keys()
    for name, p in own.items():
        parts = grads[name] if ".experts." in name else [grads[name]]
        assert all(bool(part.any()) for part in parts), f"{name} has no gradient to compare"
        tiny = 1e-8 * float(grads[name].abs().max())
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-8, atol=tiny, msg=lambda m, n=name: f"{n}: {m}")


# What follows is judged by the reference's plain rows: its own padded, packed and chunked ones are wrong for some families.


@torch.no_grad()
def test_packed_rows(pair):
    row = torch.cat([pair.short, pair.long, pair.short], 1)
    logits = pair.model(row, segments=Segments.from_lengths([[SHORT, LONG, SHORT]])).logits[0]
    assert_same(logits, torch.cat([pair.want_short, pair.want_long, pair.want_short]))


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 9, LONG - SHORT], ids=["right", "both sides", "left"])
def test_padded_rows(pair, before):
    row = torch.full((1, LONG), 2)
    real = torch.zeros(1, LONG, dtype=torch.bool)
    real[:, before : before + SHORT] = True
    row[real] = pair.short[0]
    mask = torch.cat([real, torch.ones_like(real)])
    logits = pair.model(torch.cat([row, pair.long]), segments=Segments.from_mask(mask)).logits
    assert_same(logits[0][real[0]], pair.want_short)
    assert_same(logits[1], pair.want_long)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(6, 7, 16, 17, 18), (1, 2, 3, 4, 13), tuple(range(1, LONG))], ids=["long", "short", "each"])
def test_chunks_and_steps(pair, cuts):
    state = pair.model.init_state(1, max_len=LONG)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, LONG), strict=True):
        out = pair.model(pair.long[:, start:stop], state=state)
        state = out.state
        parts.append(out.logits[0])
    assert_same(torch.cat(parts), pair.want_long)


@torch.no_grad()
def test_decoding_after_a_left_padded_prompt(pair):
    """Two rows of unequal lengths, then steps of one token in both."""
    prompt = LONG - 4
    row = torch.cat([torch.full((1, prompt - 1), 2), pair.short[:, :1]], 1)
    mask = (torch.arange(prompt) >= prompt - 1) | torch.tensor([[False], [True]])
    out = pair.model(
        torch.cat([row, pair.long[:, :prompt]]), segments=Segments.from_mask(mask), state=pair.model.init_state(2, max_len=LONG)
    )
    for i in range(4):
        step = torch.cat([pair.short[:, i + 1 : i + 2], pair.long[:, prompt + i : prompt + i + 1]])
        out = pair.model(step, state=out.state)
        assert_same(out.logits[:, 0], torch.stack([pair.want_short[i + 1], pair.want_long[prompt + i]]))


@torch.no_grad()
def test_saved_and_loaded(pair, tmp_path):
    """The recipe as text and the weights as a file, on a model that started otherwise: the same bits."""
    save_weights(pair.model, tmp_path / "model.safetensors")
    text = to_toml({"model": pair.case.language_model().to_dict()})
    config = parse_recipe(tomllib.loads(text)).model
    other = config.build(BuildContext(d_model=config.d_model, param_dtype=torch.float64, seed=1)).eval()
    want = pair.model(pair.long).logits
    assert not torch.equal(other(pair.long).logits, want)
    load_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(other(pair.long).logits, want)
