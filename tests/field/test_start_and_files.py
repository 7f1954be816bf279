"""Start values, loading, tied weights, patterns, copies, and what a state says of its size."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, Fixed, Growing, Ring, leaves, state_bytes
from hybridtf.models import expand_pattern, load_weights, save_weights
from hybridtf.models.weights import read_weights
from tests.field.layers import EVERY, F32, F64, config, every, hybrid, mixer, model

WITH_STEPS = [
    name for name in EVERY
    if "dt_range" in type(config(name)).model_fields and hasattr(mixer(name), "A_log") and hasattr(mixer(name), "dt_bias")
]


@every
@torch.no_grad()
def test_loading_redraws_nothing(name, tmp_path):
    """Every tensor set to a known value; init runs before loading, and a second time on another model."""
    net = model("a*2", {"a": name})
    for p in net.parameters():
        p.copy_(torch.randn(p.shape, dtype=F64))
    values = {key: value.clone() for key, value in net.state_dict().items()}
    save_weights(net, tmp_path / "w.safetensors")
    other = model("a*2", {"a": name}, seed=5)
    other.reset_parameters()
    load_weights(other, tmp_path / "w.safetensors")
    model("a*2", {"a": name}, seed=5).reset_parameters()
    ids = torch.randint(0, 17, (2, 7))
    assert torch.equal(other.train()(ids).logits, net.train()(ids).logits)
    assert torch.equal(other.eval()(ids).logits, net.eval()(ids).logits)
    got = other.state_dict()
    assert got.keys() == values.keys()
    assert all(torch.equal(got[key], value) for key, value in values.items())


@pytest.mark.parametrize("name", WITH_STEPS)
def test_time_steps_and_rates_start_alike_alone_and_in_a_model(name):
    made = config(name)
    low, high = made.dt_range
    alone = made.build(BuildContext(d_model=64))
    inside = model("a*2", {"a": name}, d_model=64, dtype=F32).stack.blocks()
    for layer in (alone, *(block.mixer for block in inside)):
        steps = F.softplus(layer.dt_bias.detach())
        assert low * 0.999 <= float(steps.min())
        assert float(steps.max()) <= high * 1.001
        assert len(steps.unique()) > 1
        slowest, fastest = getattr(made, "a_range", (1.0, 16.0))
        rates = layer.A_log.detach().exp()
        assert slowest * 0.999 <= float(rates.min()) < float(rates.max()) <= fastest * 1.001


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_a_tied_head_is_one_tensor_on_disk_and_stays_one(tied, dtype, tmp_path):
    head = {"head": {"type": "lm_head", "tied": tied}}
    net, other = (model("a m", {"a": "attention", "m": "mamba2"}, dtype=dtype, seed=s, **head) for s in (0, 1))
    save_weights(net, tmp_path / "w.safetensors")
    stored = read_weights(tmp_path / "w.safetensors")
    assert sum(tensor.shape == (17, 16) for tensor in stored.values()) == (1 if tied else 2)
    load_weights(other, tmp_path / "w.safetensors")
    twin = model("a m", {"a": "attention", "m": "mamba2"}, dtype=dtype, seed=2, **head)
    twin.load_state_dict(net.state_dict())
    ids = torch.randint(0, 17, (2, 6))
    for loaded in (other, twin):
        assert torch.equal(loaded(ids).logits, net(ids).logits)
        optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
        loaded.loss(ids, ids).mean().backward()
        optimizer.step()
        embedding = loaded.stem.embedding.weight
        assert (loaded.stem.tied_weight() is embedding) or not tied
        with torch.no_grad():
            x, _, extras = loaded.stem(ids)
            hidden = loaded.final_norm(loaded.stack(x, extras.edges).x)
            from_embedding = F.linear(hidden, embedding)
        assert torch.equal(loaded(ids).logits.detach(), from_embedding) == tied


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M-M*", r"column 1: no block named 'M-M'. Known: A, M"),
        ("ME*", r"column 1: no block named 'ME'. Known: A, M"),
        ("M?A", r"column 2: unknown symbol '\?'; expected a block \(A, M\), '\(', '\)' or '\*'"),
        ("", "is empty; it must name a block for each layer"), ("   ", "is empty"),
        ("m a", r"column 1: no block named 'm'. Did you mean 'M'\? Known: A, M"), ("M - A", "column 3: unknown symbol '-'"),
    ],
)
def test_a_symbol_that_no_block_has_is_named_with_its_place_and_what_is_allowed(pattern, words):
    with pytest.raises(ConfigError, match=words):
        expand_pattern(pattern, ["A", "M"], 4)


def test_known_patterns_build_the_layers_they_name():
    assert expand_pattern("M A*2 (M A)*2", ["A", "M"]) == tuple("MAAMAMA")
    assert expand_pattern("  M   A ", ["A", "M"]) == ("M", "A")
    kinds = [type(block.mixer).__name__ for block in hybrid("m a*2 (r w)").stack.blocks()]
    assert kinds == ["Mamba2", "Attention", "Attention", "GriffinRecurrent", "Attention"]


@every
def test_copies_work_after_training_and_after_decoding(name, tmp_path):
    layer = mixer(name).train()
    x = torch.randn(2, 6, 16, dtype=F64)
    layer(x)[0].sum().backward()
    layer.eval()
    with torch.no_grad():
        _, state = layer(x, state=layer.init_state(2))
        layer(x[:, :1], state=state)
    average = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(layer)
    torch.save(layer.state_dict(), tmp_path / "w.pt")
    want = layer(x)[0]
    read = mixer(name, seed=3)
    read.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    own = {p.data_ptr() for p in layer.parameters()}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), average.module, read):
        assert torch.equal(other(x)[0], want)
        assert own.isdisjoint(p.data_ptr() for p in other.parameters())


@every
@torch.no_grad()
def test_a_state_says_how_many_bytes_it_holds(name):
    layer, sizes, allocated = mixer(name), {}, {}
    for t in (0, 1, 100, 200):
        _, state = layer(torch.randn(2, t, 16, dtype=F64), state=layer.init_state(2))
        held = [value for leaf in leaves(state) for value in leaf.tensors().values()]
        sizes[t], allocated[t] = state_bytes(state, used=True), state_bytes(state)
        assert type(state_bytes(state)) is int
        assert state_bytes(state) == sum(value.numel() * value.element_size() for value in held)
    assert sizes[200] == allocated[200]
    kinds = {type(leaf) for leaf in leaves(layer.init_state(1))}
    if kinds <= {Fixed}:
        assert sizes[0] == sizes[1] == sizes[100]
    elif kinds == {Growing} and not any(leaf.sparse for leaf in leaves(layer.init_state(1))):
        assert sizes[200] == 2 * sizes[100] == 200 * sizes[1]
        assert sizes[0] == 0
    elif kinds == {Ring}:
        assert sizes[0] == 0
        assert 0 < sizes[1] < sizes[100] == sizes[200]
