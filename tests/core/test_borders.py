"""Where contracts meet: aliases between states, modes of torch, foreign kernels, and input that must not pass in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.core import (
    BuildContext,
    ConfigError,
    DataError,
    Fixed,
    Growing,
    Kernel,
    KernelSet,
    ParamSpec,
    Ring,
    Segments,
    StateError,
    always,
    crop,
    debug_states,
    detach,
    init,
    init_parameters,
    leaves,
    raw_weight,
    state_bytes,
)
from hybridtf.mixers import AttentionConfig, Mamba2Config
from hybridtf.models import LanguageModelConfig

F64 = torch.float64
CTX = BuildContext(d_model=8, param_dtype=F64)
MIXERS = {
    "attention": AttentionConfig(n_heads=2), "window": AttentionConfig(n_heads=2, window=3),
    "mamba2": Mamba2Config(head_dim=4, d_state=4, chunk_size=4),
}


def mixer(name):
    return MIXERS[name].build(CTX).eval()


def ids_model(**more):
    block = {"mixer": {"type": "attention", "n_heads": 2}}
    return LanguageModelConfig(vocab_size=9, d_model=8, pattern="a", blocks={"a": block}, **more).build(CTX).eval()


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("move", [crop, detach])
@torch.no_grad()
def test_crop_and_detach_consume_what_they_share_memory_with(name, move):
    layer, x = mixer(name), torch.randn(1, 5, 8, dtype=F64)
    _, state = layer(x, state=layer.init_state(1, 12), keep=2)
    with debug_states():
        moved = move(state, 2) if move is crop else move(state)
        with pytest.raises(StateError, match="already consumed"):
            layer(x, state=state)
        y, _ = layer(x, state=moved)
    start = x[:, :3] if move is crop else x
    torch.testing.assert_close(y, layer(torch.cat([start, x], 1))[0][:, start.shape[1] :], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_document_begun_in_this_call_can_be_cropped_whole_by_every_mixer(name):
    layer = mixer(name)
    x = torch.randn(1, 6, 8, dtype=F64)
    _, state = layer(x, segments=Segments.from_lengths([[3, 3]]), state=layer.init_state(1), keep=4)
    y, state = layer(x, state=crop(state, 3))
    torch.testing.assert_close(y, layer(x)[0], rtol=0, atol=1e-11)
    assert leaves(state)[0].length.tolist() == [6]


class Learned(nn.Module):
    """A recurrence whose first state is a parameter."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.ones(3))

    def init_state(self, b):
        return Fixed({"h": self.start.expand(b, 3)}, torch.zeros(b, dtype=torch.int64))


@torch.no_grad()
def test_debug_mode_leaves_a_learned_first_state_alone():
    module = Learned()
    state = module.init_state(2)
    with debug_states():
        state.advance({"h": state["h"] * 0.5}, None, 1)
        with pytest.raises(StateError):
            state["h"]
    assert module.start.tolist() == [1, 1, 1]


@torch.no_grad()
def test_debug_mode_poisons_old_buffers():
    leaf = Growing.empty(1, {"k": (2,)}, dtype=F64, device="cpu").append({"k": torch.ones(1, 2, 2, dtype=F64)}, None)
    buffer = leaf["k"]
    with debug_states():
        leaf.append({"k": torch.ones(1, 1, 2, dtype=F64)}, None)
    assert buffer.isnan().all()


@pytest.mark.parametrize("name", MIXERS)
def test_segments_used_in_inference_mode_serve_training_afterwards(name):
    layer, x = mixer(name), torch.randn(1, 6, 8, dtype=F64)
    segments = Segments.from_lengths([[2, 4]])
    with torch.inference_mode():
        layer(x, segments=segments)
    layer(x, segments=segments)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("name", ["attention", "window"])
def test_a_rollout_from_a_state_with_a_graph_leaves_the_graph_whole(name):
    layer, x = mixer(name), torch.randn(1, 4, 8, dtype=F64, requires_grad=True)
    y, state = layer(x, state=layer.init_state(1, 9))
    with torch.no_grad():
        layer(torch.randn(1, 1, 8, dtype=F64), state=state)
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_whatever_lies_at_pads_changes_nothing(name, value):
    layer, x = mixer(name), torch.randn(2, 7, 8, dtype=F64)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 0]]).bool()
    spoilt = torch.where(mask[..., None], x, value)
    clean = layer(x, segments=Segments.from_mask(mask))[0]
    assert torch.equal(layer(spoilt, segments=Segments.from_mask(mask))[0][mask], clean[mask])


def test_a_kernel_of_somebody_else_that_breaks_is_a_reason_and_no_crash():
    def explode(request=None):
        raise ImportError("libfoo.so: cannot open shared object file")

    kernels = KernelSet([
        Kernel("add", "foo", 50, always, explode), Kernel("add", "bar", 40, explode, lambda: torch.add),
        Kernel("add", "plain", 10, always, lambda: torch.add),
    ])
    op = kernels.bind("add", device=torch.device("cpu"), dtype=torch.float32, sizes={})
    assert set(op.chosen.values()) == {"plain"}
    reason = op.reasons["train", torch.float32]["foo"]
    assert reason == "it failed to load: ImportError: libfoo.so: cannot open shared object file"


def test_a_spec_for_a_parameter_that_does_not_exist_is_refused():
    class Typo(nn.Module):
        def __init__(self):
            super().__init__()
            self.out_proj = nn.Linear(2, 2)

        def param_specs(self):
            return {"outproj.weight": ParamSpec("matrix", init.constant(0.0), residual=True)}

    with pytest.raises(ConfigError, match=r"'outproj\.weight', which is no parameter\. Did you mean 'out_proj\.weight'\?"):
        init_parameters(Typo(), 0)


def test_fields_of_segments_that_nobody_obeys_are_refused():
    ids = torch.tensor([[1, 2, 3]])
    documents = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"segments\.global_tokens is given, and no component of this stack obeys it"):
        ids_model()(ids, segments=Segments.from_ids(documents, global_tokens=documents.bool()))
    seen = ids_model()(ids, segments=Segments.from_ids(documents, prefix_len=documents * 3)).logits
    assert not torch.allclose(seen[0, 0], ids_model()(ids).logits[0, 0])


@torch.no_grad()
def test_a_prefix_that_is_cut_is_refused():
    layer, x = mixer("attention"), torch.randn(1, 3, 8, dtype=F64)
    ones = torch.ones(1, 3, dtype=torch.int64)
    _, state = layer(x, segments=Segments.from_ids(ones, prefix_len=ones * 2), state=layer.init_state(1))
    layer(x, segments=Segments.from_ids(ones, prefix_len=ones * 2), state=state)
    _, state = layer(x, segments=Segments.from_ids(ones, prefix_len=ones * 5), state=layer.init_state(1))
    with pytest.raises(StateError, match="must lie within one call"):
        layer(x, segments=Segments.from_ids(ones, prefix_len=ones * 5), state=state)


def test_a_preset_is_not_undone_by_none():
    from hybridtf.core import active

    for preset, option in (("sliding_attention", "window"), ("gqa", "n_kv_heads")):
        options = {"type": preset, "n_heads": 2, option: None}
        with pytest.raises(ConfigError, match="is required by"):
            active()["mixers"].make(options)


def test_a_state_takes_what_it_holds_and_no_more():
    new = {"k": torch.ones(1, 1, 2), "kk": torch.ones(1, 1, 2)}
    where = {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(StateError, match=r"holds k; it was given k, kk"):
        Growing.empty(1, {"k": (2,)}, **where).append(new, None)
    with pytest.raises(StateError, match=r"holds k; it was given k, kk"):
        Ring.empty(1, {"k": (2,)}, window=2, **where).push(new, None)
    with pytest.raises(StateError, match="which tokens to hold"):
        Growing.empty(1, {"k": (2,)}, sparse=True, **where).append({"k": torch.ones(1, 1, 2)}, None)


def test_no_rows_and_no_tokens():
    model = ids_model()
    empty = model(torch.zeros(0, 3, dtype=torch.int64), state=model.init_state(0, max_len=4))
    assert state_bytes(empty.state, used=True) == 0
    with pytest.raises(DataError, match="there is no token"):
        model(torch.zeros(2, 0, dtype=torch.int64), logits="last")


def test_buffers_follow_the_dtype_that_a_model_is_cast_to():
    ctx = BuildContext(d_model=8, compute_dtype=torch.bfloat16)
    for name, leaf in (("attention", "k"), ("mamba2", "window")):
        layer = MIXERS[name].build(ctx)
        first = lambda m: leaves(m.init_state(1, 4))[0]  # noqa: E731
        assert first(layer)[leaf].dtype == torch.bfloat16
        assert first(layer.double())[leaf].dtype == F64


def test_raw_weight_only_of_a_linear_that_nothing_changed():
    plain = nn.Linear(2, 2)
    assert raw_weight(plain) is plain.weight

    class Other(torch.Tensor):
        pass

    wrapped = nn.Linear(2, 2)
    wrapped.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Other))
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda m, a, y: y)
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert [raw_weight(m) for m in (wrapped, hooked, parametrised, nn.Bilinear(2, 2, 2))] == [None] * 4


@torch.no_grad()
def test_a_refused_crop_names_the_layer_and_leaves_the_state_whole():
    blocks = {"a": {"mixer": MIXERS["attention"]}, "m": {"mixer": MIXERS["mamba2"]}}
    model = LanguageModelConfig(vocab_size=9, d_model=8, pattern="a m", blocks=blocks).build(CTX).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with debug_states():
        state = model(ids, state=model.init_state(1)).state
        with pytest.raises(StateError, match=r"state\['layers'\]\[1\]\['mixer'\]\['conv'\]: .*was not given keep"):
            crop(state, 1)
        after = model(ids, state=state).logits
    torch.testing.assert_close(after, model(torch.cat([ids, ids], 1)).logits[:, 4:], rtol=0, atol=1e-11)
