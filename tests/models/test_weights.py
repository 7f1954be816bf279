import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridtf.core import CheckpointError
from hybridtf.models.weights import index_of, missing_files, read_weights, write_tensors


def tensors(seed, n=5):
    generator = torch.Generator().manual_seed(seed)
    made = {f"layer.{i}.weight": torch.randn(4, 8, generator=generator) for i in range(n)}
    return made | {"step": torch.tensor(seed), "half": torch.ones(3, dtype=torch.bfloat16) * seed}


def assert_holds(path, expected):
    found = dict(read_weights(path))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_one_file_below_the_size_and_several_above(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(tensors(1), path, max_shard_bytes=654)
    assert names(tmp_path) == ["model.safetensors"]
    assert_holds(path, tensors(1))
    write_tensors(tensors(2), path, max_shard_bytes=300)
    assert names(tmp_path) == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert_holds(path, tensors(2))
    index = json.loads(index_of(path).read_text())
    assert index["metadata"] == {"total_size": 5 * 128 + 8 + 6}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors(2)[name])
    write_tensors(tensors(3), path)
    assert names(tmp_path) == ["model.safetensors"]
    assert_holds(path, tensors(3))


def test_a_tensor_that_is_larger_than_a_file_has_one_of_its_own(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(tensors(1), path, max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 7
    assert_holds(path, tensors(1))
    write_tensors({}, tmp_path / "empty.safetensors", max_shard_bytes=1)
    assert dict(read_weights(tmp_path / "empty.safetensors")) == {}
    assert_holds(path, tensors(1))


def test_transformers_and_the_hub_read_it(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    transformers = pytest.importorskip("transformers")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    write_tensors(model.state_dict(), tmp_path / "model.safetensors", max_shard_bytes=300)
    other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    hub.load_torch_model(other, tmp_path, strict=True)
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    llama = transformers.LlamaForCausalLM(config)
    place = tmp_path / "llama"
    place.mkdir()
    config.save_pretrained(place)
    write_tensors(llama.state_dict(), place / "model.safetensors", max_shard_bytes=400)
    loaded = transformers.LlamaForCausalLM.from_pretrained(place)
    for pair in ((model, other), (llama, loaded)):
        a, b = (m.state_dict() for m in pair)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def killed_at(monkeypatch, n):
    """Let the n-th change of a folder (a rename, a removal) kill the process, before it is made."""
    count = 0

    def counted(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == n:
                raise Killed
            return real(*args, **options)

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


@pytest.mark.parametrize("sizes", [(300, 300), (300, 200), (200, 300), (300, 10**9), (10**9, 300), (10**9, 10**9)])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path, monkeypatch, sizes):
    old, new = tensors(1), tensors(2, n=6)
    seen = set()
    for n in range(1, 50):
        place = tmp_path / str(n)
        place.mkdir()
        path = place / "model.safetensors"
        write_tensors(old, path, max_shard_bytes=sizes[0])
        with monkeypatch.context() as patch:
            killed_at(patch, n)
            try:
                write_tensors(new, path, max_shard_bytes=sizes[1])
                done = True
            except Killed:
                done = False
        found = dict(read_weights(path))
        which = "new" if "layer.5.weight" in found else "old"
        assert_holds(path, new if which == "new" else old)
        seen.add(which)
        # The next write gets over what was left, and leaves nothing of it.
        third = tensors(3)
        write_tensors(third, path, max_shard_bytes=sizes[1])
        assert_holds(path, third)
        left = {name for name in names(place) if not name.startswith(".")}
        assert left == {path.name} if sizes[1] > 1000 else left == {index_of(path).name, *json.loads(
            index_of(path).read_text())["weight_map"].values()}
        if done:
            break
    assert done
    assert seen == {"old", "new"}


@pytest.fixture
def sharded(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(tensors(1), path, max_shard_bytes=300)
    return path


def test_a_missing_file_is_named(sharded):
    gone = sharded.with_name("model-00002-of-00003.safetensors")
    gone.unlink()
    assert missing_files(sharded) == [gone]
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: no such weights file, which model"):
        read_weights(sharded)


def change(path, edit):
    index = json.loads(index_of(path).read_text())
    edit(index["weight_map"])
    index_of(path).write_text(json.dumps(index))


@pytest.mark.parametrize(("edit", "words"), [
    (lambda m: m.pop("step"), "does not name step, which is in model-00003"),
    (lambda m: m.update(ghost="model-00001-of-00003.safetensors"), "ghost is not in model-00001"),
    (lambda m: m.update(step="model-00001-of-00003.safetensors"), "step is in model-00003.* by the index, in model-00001"),
    (lambda m: m.update(step="../other.safetensors"), "files of an index lie beside it"),
    (lambda m: m.clear(), "is no index of weights"),
    (lambda m: m.update(step=3), "is no index of weights"),
])
def test_an_index_that_does_not_tell_what_is_there(sharded, edit, words):
    change(sharded, edit)
    with pytest.raises(CheckpointError, match=words):
        read_weights(sharded)


def test_a_tensor_twice_is_refused(sharded):
    second = sharded.with_name("model-00002-of-00003.safetensors")
    save_file(load_file(second) | {"layer.0.weight": torch.zeros(4, 8)}, second)
    with pytest.raises(CheckpointError, match=r"layer.0.weight is in model-00002.* and, by the index, in model-00001"):
        read_weights(sharded)
    index_of(sharded).write_text('{"weight_map": {"step": "model-00001-of-00003.safetensors", "step": "x"}}')
    with pytest.raises(CheckpointError, match="names step twice"):
        read_weights(sharded)


def test_files_that_cannot_be_read(sharded):
    sharded.with_name("model-00002-of-00003.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_weights(sharded)
    index_of(sharded).write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_weights(sharded)
    with pytest.raises(CheckpointError, match=r"no such weights file$"):
        read_weights(sharded.with_name("other.safetensors"))
