"""Positions: lengths beyond the trained one, tables in low precision, rows that are padded, counters of layers."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, Segments
from hybridtf.nn import RopeConfig
from tests.field.layers import F64, config, every, greedy, mixer, model, packed_ids, same, solo, steps


def rope(head_dim: int, max_seq_len: int = 2048, **scaling):
    """Rotary positions, with a scaling where options are given."""
    table = {"scaling": scaling} if scaling else {}
    return RopeConfig(**table).build(BuildContext(d_model=head_dim, max_seq_len=max_seq_len))


def turned(position, x, at):
    return position(x, position.table(at, x.dtype))


@torch.no_grad()
def test_decode_beyond_the_trained_length_equals_one_forward_under_dynamic_ntk():
    """The base follows the declared length, so that keys rotated early and late agree; the running one says it cannot."""
    scaling = {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 16}
    options = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 8}
    layer = mixer("attention", "cut", position={"type": "rope", "scaling": scaling}, **options)
    x = torch.randn(1, 24, 16, dtype=F64)
    for max_len in (None, 24):
        want = layer(x, state=layer.init_state(1, max_len))[0]
        same(steps(layer, x, layer.init_state(1, max_len))[0], want)
    running = mixer("attention", position={"type": "rope", "scaling": {**scaling, "mode": "running"}}, **options)
    assert "mode 'declared'" in running.cannot["cut"]


@torch.no_grad()
def test_dynamic_scaling_changes_nothing_inside_the_original_length():
    x, at = torch.randn(1, 24, 2, 8, dtype=F64), torch.arange(24)[None]
    running = rope(8, type="dynamic_ntk", factor=4.0, original_max_len=16, mode="running")
    plain = rope(8)
    assert torch.equal(turned(running, x[:, :10], at[:, :10]), turned(plain, x[:, :10], at[:, :10]))
    assert torch.equal(turned(running, x[:, :16], at[:, :16]), turned(plain, x[:, :16], at[:, :16]))
    assert not torch.allclose(turned(running, x[:, :17], at[:, :17]), turned(plain, x[:, :17], at[:, :17]))


@pytest.mark.parametrize(
    ("options", "magnitude"),
    [
        ({"factor": 16.0}, 1.2773), ({"factor": 16.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), ({"factor": 64.0}, 1.4159),
    ],
)
def test_the_magnitude_of_yarn_is_the_one_that_was_asked_for(options, magnitude):
    position = rope(8, type="yarn", original_max_len=64, **options)
    unit = torch.eye(8, dtype=F64)[None, None, :1]
    got = turned(position, unit, torch.zeros(1, 1, dtype=torch.int64))
    assert float(got.norm()) == pytest.approx(magnitude, abs=5e-5)


@torch.no_grad()
def test_positions_past_a_stretched_limit_are_rotated_as_computed_directly():
    """Trained at 16, stretched by 4: nothing runs out at 64."""
    position = rope(8, max_seq_len=64, type="linear", factor=4.0)
    x = torch.randn(1, 70, 1, 8, dtype=F64)
    angle = torch.arange(70)[:, None] / 4.0 * 10000.0 ** (-torch.arange(4, dtype=F64) / 4)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x.chunk(2, -1)
    want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    for t in (64, 65, 70):
        same(turned(position, x[:, :t], torch.arange(t)[None]), want[:, :t])
    yarn = {"type": "yarn", "factor": 4.0, "original_max_len": 16}
    layer = mixer("attention", position={"type": "rope", "scaling": yarn})
    y = torch.randn(1, 66, 16, dtype=F64)
    got, state = solo(layer, y[:, :63])
    same(torch.cat([got, steps(layer, y[:, 63:], state)[0]], 1), layer(y)[0])


def test_far_positions_do_not_fall_together_in_a_half_precision_model():
    exact = rope(32).table(torch.arange(2048)[None], F64)
    used = rope(32).to(torch.bfloat16).table(torch.arange(2048)[None], torch.bfloat16)
    for got, want in zip(used, exact, strict=True):
        assert float((got.double() - want).abs().max()) < 0.01
        assert len(got[0, :512, 0, 0].unique()) > 500


@pytest.mark.parametrize("first", ["a", "m"])
@torch.no_grad()
def test_every_layer_of_a_step_uses_the_same_position(monkeypatch, first):
    from hybridtf.nn import Rope

    seen, table = [], Rope.table

    def spy(self, positions, *args, **options):
        seen.append(positions.tolist())
        return table(self, positions, *args, **options)

    monkeypatch.setattr(Rope, "table", spy)
    net = model(f"{first} a a", {"a": "attention", **({"m": "mamba2"} if first == "m" else {})})
    ids = torch.randint(0, 17, (1, 9))
    want = net(ids).logits
    state = net(ids[:, :5], state=net.init_state(1)).state
    for t in range(5, 9):
        seen.clear()
        out = net(ids[:, t : t + 1], state=state)
        state = out.state
        assert seen == [[[t]]]  # one table, for all of them
        same(out.logits, want[:, t : t + 1])


POSITIONS = {
    "rope": ({"type": "rope"}, None), "alibi": ({"type": "alibi"}, None), "xpos": ({"type": "xpos"}, None),
    "learned": ({"type": "none"}, {"type": "learned"}), "sinusoidal": ({"type": "none"}, {"type": "sinusoidal"}),
}


@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_left_padded_rows_count_from_their_own_first_token(name):
    inside, stem = POSITIONS[name]
    more = {} if stem is None else {"stem": {"type": "token_embedding", "position": stem}}
    net = model("a*2", {"a": {**config("attention").to_dict(), "position": inside}}, max_seq_len=16, **more)
    with torch.no_grad():
        for p in net.stem.parameters():
            p.mul_(20)  # tokens and positions that decide what comes next
    prompts = [torch.randint(0, 17, (n,)) for n in (3, 8)]
    ids, segments = packed_ids(prompts, left=True)
    logits = net(ids, segments=segments).logits
    for i, prompt in enumerate(prompts):
        same(logits[i, 8 - len(prompt) :], net(prompt[None]).logits[0])
    assert greedy(net, ids, 5, segments) == [greedy(net, prompt[None], 5)[0] for prompt in prompts]


@every
@torch.no_grad()
def test_a_model_built_on_meta_and_loaded_equals_a_normal_one(name):
    """What is not in a checkpoint (tables, frequencies) must not stay uninitialised."""
    net, empty = (model("a*2", {"a": name}, seed=seed) for seed in (0, 1))
    empty = empty.to("meta").to_empty(device="cpu")
    empty.load_state_dict(net.state_dict())
    ids = torch.randint(0, 17, (2, 9))
    assert torch.equal(empty(ids).logits, net(ids).logits)
    segments = Segments.from_mask(torch.arange(9) >= torch.tensor([[3], [0]]))
    assert torch.equal(empty(ids, segments=segments).logits, net(ids, segments=segments).logits)
