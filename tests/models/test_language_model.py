from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import (
    BuildContext,
    CheckpointError,
    ConfigError,
    DataError,
    LengthError,
    Segments,
    StateError,
    state_bytes,
    state_lengths,
)
from hybridtf.mixers import Mamba2
from hybridtf.models import LanguageModelConfig, load_weights, save_weights
from hybridtf.models.weights import canonical_tensors, read_weights

BLOCKS = {
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "channel_mixer": {"type": "mlp", "d_ff": 12}},
    "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "w": {
        "type": "parallel", "mixer": {"type": "sliding_attention", "n_heads": 2, "window": 3},
        "channel_mixer": {"type": "geglu", "d_ff": 12},
    },
}


def build(pattern="m a w", seed=0, dtype=torch.float64, **more):
    blocks = {name: BLOCKS[name] for name in BLOCKS if name in pattern}
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern=pattern, blocks=blocks, **more)
    return config.build(BuildContext(d_model=16, param_dtype=dtype, seed=seed)).eval()


@pytest.mark.parametrize("pattern", ["m a", "a m", "m m", "m a m a", "a w m"])
def test_the_state_knows_its_length_whatever_comes_first(pattern):
    model = build(pattern)
    ids = torch.arange(16).reshape(2, 8) % 17
    full = model(ids).logits
    state = model.init_state(2)
    out = model(ids[:, :6], state=state)
    assert state_lengths(out.state).tolist() == [6, 6]
    last = model(ids[:, 6:], state=out.state)
    assert state_lengths(last.state).tolist() == [8, 8]
    torch.testing.assert_close(torch.cat([out.logits, last.logits], 1), full, rtol=0, atol=1e-12)


def test_learned_positions_count_within_documents_and_refuse_what_they_cannot_place():
    model = build("a m", max_seq_len=8, stem={"type": "token_embedding", "position": {"type": "learned"}})
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7, 8]])
    packed = model(torch.cat([a, b], 1), segments=Segments.from_lengths([[3, 5]])).logits
    torch.testing.assert_close(packed, torch.cat([model(a).logits, model(b).logits], 1), rtol=0, atol=1e-12)
    state = model(b, state=model.init_state(1)).state
    torch.testing.assert_close(
        model(a, state=state).logits, model(torch.cat([b, a], 1)).logits[:, 5:], rtol=0, atol=1e-12
    )
    with pytest.raises(LengthError, match=r"9 tokens is longer than the learned position table \(max_seq_len = 8\)"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_an_affine_stem_adds_and_multiplies_before_its_norm():
    stem = build("a", stem={"type": "token_embedding", "affine": True, "scale": 2.0, "norm": {"type": "rms_norm"}}).stem
    ids = torch.arange(5)[None]
    plain = stem.norm(2.0 * stem.embedding(ids))
    torch.testing.assert_close(stem(ids)[0], plain)  # nothing at the start
    with torch.no_grad():
        stem.affine.scale.uniform_(0.5, 2.0)
        stem.affine.bias.normal_()
    want = stem.norm((2.0 * stem.embedding(ids) + stem.affine.bias) * stem.affine.scale)
    x, _, extras = stem(ids)
    torch.testing.assert_close(x, want)
    torch.testing.assert_close(extras.edges["embedding"], want)


def test_rope_given_to_the_stem_and_learned_given_to_a_mixer_are_refused():
    with pytest.raises(ConfigError, match="give it to a mixer"):
        build("a", stem={"type": "token_embedding", "position": {"type": "rope"}})
    block = {"mixer": {"type": "attention", "n_heads": 2, "position": {"type": "learned"}}}
    with pytest.raises(ConfigError, match="give it to the stem"):
        LanguageModelConfig(vocab_size=5, d_model=8, pattern="a", blocks={"a": block}).build()


def test_last_logits_are_those_of_each_rows_last_real_token():
    model = build()
    ids = torch.arange(12).reshape(2, 6) % 17
    segments = Segments.from_mask(torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]))
    full = model(ids, segments=segments).logits
    last = model(ids, segments=segments, logits="last").logits
    torch.testing.assert_close(last, torch.stack([full[0, 3], full[1, 5]]))
    assert model(ids, logits="none").logits is None


def test_loss_counts_scored_tokens_and_documents_apart():
    model = build()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    targets = torch.tensor([[2, 3, -100, 5, 6, -100]])
    loss = model.loss(ids, targets, Segments.from_lengths([[3, 3]]))
    want = sum(
        F.cross_entropy(model(part).logits[0, :2], goal, reduction="sum")
        for part, goal in ((ids[:, :3], targets[0, :2]), (ids[:, 3:], targets[0, 3:5]))
    )
    torch.testing.assert_close(loss.total, want)
    assert int(loss.count) == 4
    torch.testing.assert_close(loss.mean(), want / 4)


def test_token_ids_outside_the_vocabulary():
    with pytest.raises(DataError, match="token id 17 is outside the vocabulary of 17"):
        build()(torch.tensor([[17]]))


def test_tied_head_is_one_tensor_in_memory_on_disk_and_after_a_step(tmp_path):
    model = build(head={"type": "lm_head", "tied": True})
    save_weights(model, tmp_path / "weights.safetensors")
    assert "head.proj.weight" not in read_weights(tmp_path / "weights.safetensors")
    other = build(seed=1, head={"type": "lm_head", "tied": True})
    load_weights(other, tmp_path / "weights.safetensors")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.loss(ids, ids).mean().backward()
    optimizer.step()
    with torch.no_grad():
        out = other.stack(*_embedded(other, ids)).x
        torch.testing.assert_close(other(ids).logits, other.final_norm(out) @ other.stem.embedding.weight.T)
    other.stem.embedding = torch.nn.Embedding(17, 16, dtype=torch.float64)  # a replaced embedding is the head's too
    with torch.no_grad():
        out = other.stack(*_embedded(other, ids)).x
        torch.testing.assert_close(other(ids).logits, other.final_norm(out) @ other.stem.embedding.weight.T)


@pytest.mark.parametrize("tied", [True, False])
def test_a_transform_comes_before_the_scores(tied):
    transform = {"activation": "relu", "bias": True, "norm": {"type": "layer_norm", "eps": 1e-3}}
    model = build(head={"type": "lm_head", "tied": tied, "bias": True, "transform": transform})
    generator, ids = torch.Generator().manual_seed(3), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for p in model.head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        head = model.head
        x = model.final_norm(model.stack(*_embedded(model, ids)).x) @ head.transform.dense.weight.T + head.transform.dense.bias
        norm = head.transform.norm
        x = torch.nn.functional.layer_norm(x.relu(), x.shape[-1:], norm.weight, norm.bias, 1e-3)
        weight, bias = (model.stem.embedding.weight, head.bias) if tied else (head.proj.weight, head.proj.bias)
        torch.testing.assert_close(model(ids).logits, x @ weight.T + bias, rtol=0, atol=1e-12)
        torch.testing.assert_close(model(ids, logits="last").logits, model(ids).logits[:, -1], rtol=0, atol=1e-12)


def _embedded(model, ids):
    x, _, extras = model.stem(ids)
    return x, extras.edges


def test_load_restores_every_tensor_and_redraws_none(tmp_path):
    model = build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    save_weights(model, tmp_path / "w.safetensors")
    other = build(seed=5)
    load_weights(other, tmp_path / "w.safetensors")
    for name, value in canonical_tensors(model).items():
        assert torch.equal(value, canonical_tensors(other)[name]), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_bytes(b"not a file"), "not a readable safetensors file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "not a readable safetensors file"),
        (lambda p: p.unlink(), "no such weights file"),
    ],
)
def test_corrupt_weights(tmp_path, make, message):
    path = tmp_path / "w.safetensors"
    save_weights(build(), path)
    make(path)
    with pytest.raises(CheckpointError, match=message):
        load_weights(build(), path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_weights(build("m a"), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"stack\.layers\.2\.mixer.*is missing"):
        load_weights(build("m a w"), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"float64.*model's is torch\.float32"):
        load_weights(build("m a", dtype=torch.float32), tmp_path / "w.safetensors")


def test_meta_build_then_materialise_equals_a_normal_build():
    model = build(seed=4)
    config = model.config
    ghost = config.build(BuildContext(d_model=16, param_dtype=torch.float64, seed=4, device=torch.device("meta")))
    assert all(p.is_meta for p in ghost.parameters())
    real = ghost.to_empty(device="cpu").eval()
    real.reset_parameters()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(real(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_same_numbers_in_every_dtype_at_the_start():
    wide, narrow = build(dtype=torch.float64), build(dtype=torch.bfloat16)
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_state_bytes_by_kind():
    at = lambda pattern, n: state_bytes(build(pattern).init_state(1, max_len=n))  # noqa: E731
    assert at("a", 100) == 100 * 2 * 2 * 4 * 8
    assert at("m", 100) == at("m", 10)
    assert at("w", 100) == at("w", 10) == 3 * 2 * 2 * 8 * 8


def test_deepcopy_after_a_call_is_independent():
    model = build()
    ids = torch.tensor([[1, 2, 3]])
    model.loss(ids, ids).mean().backward()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=0)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert float(model(ids).logits.detach().abs().max()) > 0


def test_positions_are_the_same_in_every_layer(monkeypatch):
    from hybridtf.nn import Rope

    seen = []
    table = Rope.table

    def spy(self, positions, *args, **options):
        seen.append(positions.tolist())
        return table(self, positions, *args, **options)

    monkeypatch.setattr(Rope, "table", spy)
    model = build("m a a a")
    state = model(torch.tensor([[1, 2, 3, 4, 5]]), state=model.init_state(1)).state
    for step in range(4):
        seen.clear()
        state = model(torch.tensor([[step]]), state=state).state
        assert seen == [[[5 + step]]] * 3  # once a layer, for queries and keys


def test_every_mixer_receives_the_segments(monkeypatch):
    model = build("m a w")
    seen = []
    for block in model.stack.blocks():
        block.mixer.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["segments"]), with_kwargs=True)
    segments = Segments.from_lengths([[4, 8]])
    model(torch.zeros(1, 12, dtype=torch.int64), segments=segments)
    assert all(s is segments for s in seen)
    assert len(seen) == 3
    with pytest.raises(TypeError):
        model(torch.zeros(1, 2, dtype=torch.int64), cu_seqlens=[0, 2])


def test_a_call_that_does_not_fit_is_refused_before_any_layer():
    model = build()
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(DataError, match=r"int64 of shape \(b, t\); got torch\.int64 \(3,\)"):
        model(ids[0])
    with pytest.raises(DataError, match=r"got torch\.float32"):
        model(ids.float())
    with pytest.raises(StateError, match="the state has 2 rows, the token ids 1"):
        model(ids, state=model.init_state(2))
    with pytest.raises(DataError, match=r"segments are of shape \(1, 4\), the token ids \(1, 3\)"):
        model(ids, segments=Segments.from_lengths([[4]]))


def test_embeddings_are_scaled():
    for scale, factor in ((2.5, 2.5), ("sqrt_d_model", 4.0)):
        model = build("a", stem={"type": "token_embedding", "scale": scale})
        ids = torch.tensor([[1, 2, 3]])
        x, _, extras = model.stem(ids)
        torch.testing.assert_close(x, factor * model.stem.embedding(ids), rtol=0, atol=0)
        assert extras.edges["embedding"] is x
    with pytest.raises(ConfigError, match=r"scale: .*valid number.*; or .*'sqrt_d_model', got 'sqrt'"):
        build("a", stem={"type": "token_embedding", "scale": "sqrt"})


def test_a_model_that_cannot_tell_documents_apart_refuses_segments(monkeypatch):
    monkeypatch.setattr(Mamba2, "cannot", {"segment": "a filter over the whole row"})
    model = build("m a")
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(ids)
    with pytest.raises(ConfigError, match=r"cannot tell documents or padding apart: stack\.layers\.0\.mixer says: a filter"):
        model(ids, segments=Segments.from_lengths([[2, 2]]))
