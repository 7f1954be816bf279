"""Layers that share keys and values: by hand, in a model, and what is refused."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from hybridtf.core import (
    BuildContext,
    ConfigError,
    EdgeSpec,
    Segments,
    SequenceMixer,
    StateError,
    crop,
    debug_states,
    reorder,
    restore,
    snapshot,
    state_bytes,
)
from hybridtf.cost import state_size
from hybridtf.mixers import AttentionConfig
from hybridtf.mixers.attention import Attention
from hybridtf.models import BeamConfig, GenerationConfig, LanguageModelConfig, beam_search, generate
from hybridtf.testing import Subject, check_mixer, run_law
from tests.models.tiny_models import assert_can_be_cut, in_pieces

D = 12
OPTIONS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "qk_norm": {"type": "rms_norm"}}


def build(**options):
    return AttentionConfig(**{**OPTIONS, **options}).build(BuildContext(d_model=D, param_dtype=torch.float64))


def test_a_reader_attends_to_what_another_layer_holds():
    giver, reader = build(kv_group="far", kv_role="gives"), build(kv_group="far", kv_role="reads")
    assert {name for name, _ in reader.named_parameters()} == {"q_proj.weight", "q_norm.weight", "out_proj.weight"}
    x, other = torch.randn(2, 2, 7, D, dtype=torch.float64)
    _, _, extras = giver(other)
    got, _ = reader(x, edges=extras.edges)
    plain = build()
    plain.load_state_dict({**giver.state_dict(), **reader.state_dict()})
    of_other = {name: getattr(giver, name)(other) for name in ("k_proj", "v_proj")}
    plain.k_proj.forward, plain.v_proj.forward = (lambda _, z=z: z for z in of_other.values())
    torch.testing.assert_close(got, plain(x)[0], rtol=0, atol=1e-14)


def test_values_are_normed_or_keys_as_they_are_projected():
    norm = {"type": "rms_norm", "weight": False}
    mixer, x = build(values_from="keys", v_norm=norm), torch.randn(2, 5, D, dtype=torch.float64)
    assert not hasattr(mixer, "v_proj")
    k, v = mixer.keys_and_values(x)
    torch.testing.assert_close(k.flatten(2), mixer.k_proj(x))
    torch.testing.assert_close(v, k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


SHARED = {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "kv_group": "far"}
GIVES, READS = {**SHARED, "kv_role": "gives"}, {**SHARED, "kv_role": "reads"}
BLOCKS = {
    "a": {"mixer": SHARED}, "w": {"mixer": {**SHARED, "window": 3}}, "g": {"mixer": {**GIVES, "window": 5}},
    "v": {"mixer": {**READS, "window": 5}}, "s": {"mixer": {**READS, "window": 4}, "shared": True},
    "b": {"mixer": {"type": "parallel", "branches": [READS, {"type": "attention", "n_heads": 2}]}},
}
PATTERNS = ("a w a b s s", "g v w g v s")
"""A reader of all, with windows, beside another mixer and shared; and readers of two layers that hold a window."""


def model(pattern, **more):
    blocks = {**BLOCKS, "r": {"mixer": {**SHARED, **more}}}
    used = {name: block for name, block in blocks.items() if name in pattern.split()}
    ctx = BuildContext(d_model=8, param_dtype=torch.float64)
    return LanguageModelConfig(vocab_size=17, d_model=8, pattern=pattern, blocks=used).build(ctx).eval()


def tokens(b, t):
    return torch.randint(0, 17, (b, t), generator=torch.Generator().manual_seed(t))


def as_copies(made):
    """The same model, whose readers hold what they read."""
    found = deepcopy(made)
    for mixer in found.modules():
        if isinstance(mixer, Attention):
            mixer.in_stack = False
    return found


def test_the_first_layer_of_a_name_gives():
    made = model("a w a")
    assert [hasattr(layer.mixer, "k_proj") for layer in made.stack.layers.values()] == [True, False, False]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sizes", [[4, 4, 5], [1] * 13, [7, 1, 0, 5]], ids=str)
def test_a_model_can_be_cut(pattern, sizes):
    made, ids = model(pattern), tokens(2, 13)
    assert_can_be_cut(made, ids, sizes)
    with torch.no_grad():  # written in place
        got, _ = in_pieces(made, ids, sizes, made.init_state(2, max_len=13))
    torch.testing.assert_close(got, made(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_reach_what_was_given_in_earlier_calls(pattern):
    made, ids, found = model(pattern), tokens(2, 9), []
    for sizes in ([9], [3, 4, 1, 1]):
        made.zero_grad()
        got, _ = in_pieces(made, ids, sizes, made.init_state(2))
        got.square().sum().backward()
        found.append([p.grad.clone() for p in made.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_documents_rows_and_going_back(pattern):
    made, first, second, more = model(pattern), tokens(1, 6), tokens(1, 9), tokens(3, 4)
    alone = made(second).logits
    packed = made(
        torch.cat([first, second[:, :4]], 1), segments=Segments.from_lengths([[6, 4]]), state=made.init_state(1), keep=1
    )
    torch.testing.assert_close(packed.logits, torch.cat([made(first).logits, alone[:, :4]], 1), rtol=0, atol=1e-12)
    rest = made(second[:, 3:], state=crop(packed.state, 1), keep=3)
    torch.testing.assert_close(rest.logits, alone[:, 3:], rtol=0, atol=1e-12)
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    branches = reorder(rest.state, torch.tensor([0, 0, 0]))
    kept, want = snapshot(branches), made(more, state=restore(snapshot(branches)), segments=Segments.from_mask(real)).logits
    for row in range(3):
        whole = made(torch.cat([second, more[row : row + 1, real[row]]], 1)).logits[0, 9:]
        torch.testing.assert_close(want[row, real[row]], whole, rtol=0, atol=1e-12)
    again = made(more, state=restore(kept), segments=Segments.from_mask(real)).logits
    assert torch.equal(again, want)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_state_is_that_of_the_layers_that_give(pattern):
    made, n = model(pattern), 7
    copies = as_copies(made)
    state = made(tokens(2, n), state=made.init_state(2)).state
    copied = copies(tokens(2, n), state=copies.init_state(2)).state
    a_token, rings = 2 * 4 * 8, pattern.count("g")  # keys and values of one head, in float64
    own = n * (pattern.startswith("a") + 2 * pattern.count("b")) + 5 * rings
    assert state_bytes(state) == 2 * own * a_token
    assert state_size(made, n, batch_size=2)["allocated"] == state_bytes(state) < state_bytes(copied)


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_beams_are_those_of_copies(pattern):
    made, config = model(pattern), BeamConfig(n_beams=3, max_new_tokens=6)
    found, want = (
        [beam for beams in beam_search(one, [[1, 2, 3], [4]], config) for beam in beams] for one in (made, as_copies(made))
    )
    assert [beam.tokens for beam in found] == [beam.tokens for beam in want]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in want], abs=1e-12)


def test_what_was_not_looked_at_in_the_same_calls_is_refused():
    reader = model("a r", kv_role="reads").stack.layers["1"].mixer
    x, (k, v) = torch.randn(1, 3, 8).double(), torch.randn(2, 1, 2, 1, 4).double()
    with pytest.raises(StateError, match="3 slots are wanted, and 2 given"):
        reader(x, state=reader.init_state(1), edges={"far_keys": k, "far_values": v})


@torch.no_grad()
def test_a_reader_that_no_stack_has_told_refuses_more_than_the_call():
    made, ids = model("a r", kv_role="reads"), tokens(1, 4)
    made.stack.layers["1"].mixer.in_stack = False
    state = made(ids[:, :3], state=made.init_state(1)).state
    for segments in (None, Segments.from_lengths([[1]])):
        with pytest.raises(StateError, match=r"r.mixer: kv_group 'far': keys of \d tokens are given in a call of 1"):
            made(ids[:, 3:], state=state, segments=segments)


class Untold(SequenceMixer):
    """Reads another layer's keys as those of the call, as every edge was read before some could reach beyond it."""

    reads = ("far_keys",)

    def __init__(self, told):
        super().__init__()
        self.told = told

    def edge_specs(self):
        return {"far_keys": EdgeSpec((1, 4))} if self.told else {}

    def init_state(self, batch_size, max_len=None):
        return ()

    def forward(self, x, *, edges, segments=None, state=None, context=None, keep=0):
        return x + edges["far_keys"].sum((2, 3))[..., None], state


@pytest.mark.parametrize("told", [True, False])
def test_a_reader_of_the_calls_tokens_cannot_read_what_reaches_beyond(told, monkeypatch):
    plain = AttentionConfig.build
    monkeypatch.setattr(AttentionConfig, "build", lambda self, ctx: Untold(told) if "r." in ctx.where else plain(self, ctx))
    with pytest.raises(ConfigError, match=r"r.mixer: layer 1 reads the edge 'far_keys' of the call's tokens, and .* on all"):
        model("a r")


class Doubled(Attention):
    """Attends in a way of its own, by the method that there was before layers shared what they look at."""

    def attend(self, *args, **options):
        y, after = super().attend(*args, **options)
        return 2 * y, after


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["f", "a"])
def test_a_way_of_its_own_to_attend_is_gone(pattern, monkeypatch):
    monkeypatch.setitem(BLOCKS, "f", {"mixer": {"type": "attention", "n_heads": 2}})
    plain = model(pattern).stack.layers["0"].mixer
    monkeypatch.setattr(AttentionConfig, "build", lambda self, ctx: Doubled(self, ctx))
    own = model(pattern).stack.layers["0"].mixer
    own.load_state_dict(plain.state_dict())
    x, state = torch.randn(1, 5, 8, dtype=torch.float64), own.init_state(1)
    for part, want in zip(x.split([3, 1, 1], 1), (2 * plain(x)[0]).split([3, 1, 1], 1), strict=True):
        y, state = own(part, state=state)[:2]
        torch.testing.assert_close(y, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("law", ["cut", "segment", "gradients", "crop"])
def test_laws_of_a_reader(law):
    run_law(Subject("mixers", AttentionConfig(**OPTIONS, kv_group="far", kv_role="reads")), law)


@pytest.mark.slow
def test_all_laws_of_a_reader():
    check_mixer(AttentionConfig(**OPTIONS, kv_group="far", kv_role="reads", window=3))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["a w a", "g v w g v"])
def test_compiled_decoding_says_what_eager_decoding_says(pattern):
    made, prompts = model(pattern), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    plain = GenerationConfig(max_new_tokens=6, temperature=1.1)
    fast = plain.model_copy(update={"compile": True, "compile_backend": "aot_eager"})
    with debug_states():
        assert generate(made, prompts, fast) == generate(made, prompts, plain)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="reads the edge 'far_keys', which no earlier component writes"):
        model("r a", kv_role="reads")
    with pytest.raises(ConfigError, match=r"reads the edge 'far_keys' as \(b t 2 4\), .* has it as \(b t 1 4\)"):
        model("a r", n_kv_heads=2, kv_role="reads")
    with pytest.raises(ConfigError, match=r"r.mixer: kv_group 'far': .* sees all tokens, and the one .* holds 5"):
        model("g r", kv_role="reads")
    with pytest.raises(ConfigError, match=r"r.mixer: kv_group 'far': .* sees 6 tokens, and the one .* holds 5"):
        model("g r", kv_role="reads", window=6)
    with pytest.raises(ConfigError, match=r"s.mixer: kv_group 'far': a shared block reads from layers of two windows"):
        model("g s r s", kv_role="gives")
    for options, why in (
        ({"kv_role": "reads"}, "does nothing beside no kv_group"),
        ({"kv_group": "far", "value_residual": "first"}, "give one"),
        ({"kv_group": "far", "kv_role": "reads", "values_from": "keys"}, "of a layer with keys and values of its own"),
        ({"values_from": "keys", "v_dim": 5}, "values as wide as keys"),
    ):
        with pytest.raises(ValueError, match=why):
            build(**options)
