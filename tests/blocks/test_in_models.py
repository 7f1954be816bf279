"""Stacks of every wiring: packed, cut, checkpointed, trained; and how they start."""

from __future__ import annotations

import pytest
import torch

from hybridtf.blocks import AltUpConfig, AltUpSideConfig
from hybridtf.blocks.attention_residual import GroupsConfig
from hybridtf.blocks.options import WiringConfig
from hybridtf.blocks.streams import StreamsConfig
from hybridtf.core import BuildContext, Segments, active
from hybridtf.models import LanguageModelConfig

ATTENTION = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "channel_mixer": {"type": "mlp", "d_ff": 12}}
OPTIONS = {"residual_scale": 0.7, "norm": {"type": "rms_norm", "unit_offset": True}}
WIRINGS = sorted(
    name for name, cls in active()["blocks"].configs().items()
    if issubclass(cls, WiringConfig) and not issubclass(cls, StreamsConfig | GroupsConfig | AltUpConfig | AltUpSideConfig)
)
IDS = torch.randint(0, 13, (2, 11), generator=torch.Generator().manual_seed(0))


def build(blocks, pattern, **more):
    config = LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks, **more)
    return config.build(BuildContext(d_model=8, param_dtype=torch.float64))


def mixed(**more):
    # A block beside the stream changes the width, which heads alone can.
    kinds = {name: ATTENTION if i % 2 or name == "beside" else MAMBA for i, name in enumerate(WIRINGS)}
    blocks = {name: {**kind, **OPTIONS, "type": name} for name, kind in kinds.items()}
    blocks["shortcut"]["shortcut"] = {"type": "mlp", "d_ff": 6}
    blocks["join"] = {"type": "inject", "edge": "shortcut"}
    return build(blocks, " ".join([*WIRINGS, "join"]), **more)


def test_cut_and_packed():
    model = mixed().eval()
    full = model(IDS).logits
    state, got = model.init_state(2), []
    for chunk in IDS.split([1, 5, 0, 2, 3], 1):
        out = model(chunk, state=state)
        state, got = out.state, [*got, out.logits]
    torch.testing.assert_close(torch.cat(got, 1), full, rtol=0, atol=1e-11)
    packed = model(IDS, segments=Segments.from_lengths([[3, 7], [11]])).logits
    torch.testing.assert_close(packed[1], full[1], rtol=0, atol=1e-11)
    torch.testing.assert_close(packed[:1, 3:10], model(IDS[:1, 3:10]).logits, rtol=0, atol=1e-11)


def test_trains():
    model = mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model.loss(IDS[:, :-1], IDS[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", ["prenorm", "sandwich", "output_norm", "parallel"])
def test_silent_branches_leave_the_stream_and_learn(name):
    model = build({"a": {**ATTENTION, "type": name}}, "a*3", residual_init="zero")
    x = model.stem(IDS)[0]
    assert torch.equal(model.stack(x, {}).x, x)
    model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
    ends = ("post_norm.weight",) if name in ("sandwich", "output_norm") else ("out_proj.weight", "down_proj.weight")
    found = {n: p for n, p in model.stack.named_parameters() if n.endswith(ends)}
    assert len(found) == 6
    for p in found.values():
        assert not p.any()
        assert p.grad.any()


@pytest.mark.parametrize("name", ["prenorm", "sandwich", "output_norm", "normed_stream", "parallel"])
def test_the_stream_keeps_its_size_however_deep(name):
    """Each branch starts at about (2 n_layers)^-0.5 of the stream, so that all of them together are of its size."""
    sizes = []
    for depth in (2, 32):
        stem = {"type": "token_embedding", "scale": "sqrt_d_model"}
        model = build({"a": {**ATTENTION, "type": name}}, f"a*{depth}", stem=stem)
        x = model.stem(IDS)[0]
        y = model.stack(x, {}).x.detach()
        sizes.append(float(y.square().mean().sqrt() / x.detach().square().mean().sqrt()))
    assert min(sizes) > 0.8
    assert max(sizes) < 1.7


def test_the_original_transformer_needs_no_final_norm():
    model = build({"a": {**ATTENTION, "type": "postnorm"}}, "a*2", final_norm={"type": "none"})
    x = model.stack(model.stem(IDS)[0], {}).x
    torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 11, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(model(IDS).logits, x @ model.stem.embedding.weight.T, rtol=0, atol=1e-12)
