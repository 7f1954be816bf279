import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError, DataError, NonFiniteError, Segments
from hybridtf.models import LanguageModelConfig
from hybridtf.tasks import Batch, Totals
from hybridtf.tasks.mqar import MQARConfig
from hybridtf.train import evaluate
from tests.train.runs import build, recipe, run, task


@pytest.fixture
def parts(tmp_path):
    made = recipe(tmp_path)
    return build(made, torch.float64), task(made)


def nats_of(model, inputs, targets):
    with torch.no_grad():
        logits = model(inputs[None]).logits[0]
    return float(F.cross_entropy(logits, targets, reduction="sum"))


def by_documents(model, side):
    model.eval()
    return {d.name: nats_of(model, d.inputs, d.targets) for d in side.eval_documents()}


def by_windows(model, side, seq_len, stride):
    model.eval()
    out = {}
    for d in side.eval_documents():
        scored = {}
        for k in range(len(d.targets)):
            # Token t is scored by the first window that reaches it.
            stop = min(seq_len + k * stride, len(d.targets))
            start = max(stop - seq_len, 0)
            with torch.no_grad():
                logits = model(d.inputs[None, start:stop]).logits[0]
            losses = F.cross_entropy(logits, d.targets[start:stop], reduction="none").tolist()
            for t, nats in zip(range(start, stop), losses, strict=True):
                scored.setdefault(t, nats)
            if stop == len(d.targets):
                break
        out[d.name] = sum(scored.values())
    return out


@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 16), (2, 7), (3, 64), (5, 1), (2, 500)])
def test_documents_with_carried_state(parts, batch_size, seq_len):
    model, side = parts
    result = evaluate(model, side, batch_size=batch_size, seq_len=seq_len, context="document")
    expected = by_documents(model, side)
    assert {s.name: s.totals.nats for s in result.by_document} == pytest.approx(expected, rel=1e-9)
    assert result.nats == pytest.approx(sum(expected.values()), rel=1e-9)
    assert result.n_tokens == result.n_bytes == sum(len(d.targets) for d in side.eval_documents())
    assert result.complete


@pytest.mark.parametrize(("batch_size", "seq_len", "stride"), [(2, 16, 8), (1, 13, 13), (3, 20, 3)])
def test_windows(parts, batch_size, seq_len, stride):
    model, side = parts
    result = evaluate(model, side, batch_size=batch_size, seq_len=seq_len, stride=stride)
    expected = by_windows(model, side, seq_len, stride)
    assert {s.name: s.totals.nats for s in result.by_document} == pytest.approx(expected, rel=1e-9)
    assert result.n_tokens == sum(len(d.targets) for d in side.eval_documents())


def test_windows_agree_with_the_tasks_own_batches(parts):
    model, side = parts
    result = evaluate(model, side, batch_size=2, seq_len=16)
    model.eval()
    total = tokens = n_bytes = 0
    for batch in side.eval_batches(2, 16):
        with torch.no_grad():
            total += float(model.loss(batch.inputs, batch.targets, batch.segments).total)
        tokens, n_bytes = tokens + batch.n_tokens, n_bytes + batch.n_bytes
    assert (result.n_tokens, result.n_bytes) == (tokens, n_bytes)
    assert result.nats == pytest.approx(total, rel=1e-9)


def test_the_measures_follow_from_the_sums(parts):
    model, side = parts
    result = evaluate(model, side, seq_len=32)
    assert result.bits_per_byte == result.metrics["bits_per_byte"] == result.nats / math.log(2) / result.n_bytes
    assert result.loss == result.nats / result.n_tokens
    correct = 0
    for d in side.eval_documents():
        with torch.no_grad():
            correct += int((model(d.inputs[None, :32]).logits[0].argmax(-1) == d.targets[:32]).sum())
    short = evaluate(model, side, seq_len=32, max_tokens=32 * len(result.by_document))
    assert short.totals.n_correct == correct


@pytest.mark.parametrize("context", ["window", "document"])
def test_a_cap_takes_the_start_of_every_document(parts, context):
    model, side = parts
    documents = list(side.eval_documents())
    result = evaluate(model, side, seq_len=16, max_tokens=100, context=context)
    each = 100 // len(documents)
    assert [s.totals.n_tokens for s in result.by_document] == [each] * len(documents)
    assert not result.complete
    few = evaluate(model, side, seq_len=16, max_tokens=1, context=context)
    assert [s.name for s in few.by_document] == [documents[0].name]
    assert evaluate(model, side, seq_len=16, max_tokens=10**6, context=context).complete


def test_the_model_is_left_as_it_was(parts):
    model, side = parts
    model.train()
    first = evaluate(model, side, seq_len=16)
    second = evaluate(model, side, seq_len=16)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    # Dropout is in the recipe: with it on, the two would differ.
    assert first.nats == second.nats


class Rows:
    """A task without documents."""

    name = "rows"

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(3):
            ids = torch.randint(0, 257, (2, 6), generator=generator)
            targets = torch.randint(0, 257, (2, 6), generator=generator)
            targets[0, :4] = -100
            self.batches.append(Batch(ids, targets, None, 8))

    def eval_batches(self, batch_size, seq_len):
        return iter(self.batches)

    def metrics(self, totals: Totals):
        return {"accuracy": totals.accuracy}


def test_a_task_of_rows(parts):
    model, side = parts[0].eval(), Rows()
    result = evaluate(model, side)
    with torch.no_grad():
        expected = sum(float(model.loss(b.inputs, b.targets).total) for b in side.batches)
    assert result.nats == pytest.approx(expected, rel=1e-9)
    assert [s.totals.n_tokens for s in result.by_document] == [2, 6] * 3
    capped = evaluate(model, side, max_tokens=17)
    assert (capped.n_tokens, capped.complete) == (16, False)
    with pytest.raises(ConfigError, match="the task 'rows' has no documents"):
        evaluate(model, side, context="document")


def test_a_row_is_right_where_all_its_scored_tokens_are(parts):
    model, side = parts[0].eval(), Rows()
    for number, batch in enumerate(side.batches):
        with torch.no_grad():
            said = model(batch.inputs).logits.argmax(-1)
        wanted = batch.targets.clone()
        wanted[0] = torch.where(wanted[0] == -100, -100, said[0])  # right, where it is scored
        wanted[1, number:] = said[1, number:]  # but for the first 0, 1, 2 tokens
        wanted[1, :number] = (said[1, :number] + 1) % 257
        side.batches[number] = Batch(batch.inputs, wanted, None, batch.n_tokens)
    result = evaluate(model, side)
    assert (result.totals.n_rows, result.totals.n_rows_correct) == (6, 4)
    assert result.totals.n_correct == result.n_tokens - 3
    assert [score.totals.n_rows_correct for score in result.by_document] == [1, 1, 1, 0, 1, 0]
    assert result.totals.row_accuracy == 4 / 6


def test_rows_without_scored_tokens_and_documents_are_no_rows(parts):
    model, side = parts
    blank = Rows()
    blank.batches = [Batch(b.inputs, b.targets.index_fill(0, torch.tensor([1]), -100), None, 2) for b in blank.batches]
    assert evaluate(model, blank).totals.n_rows == 3
    totals = evaluate(model, side).totals
    assert (totals.n_rows, totals.n_rows_correct) == (0, 0)
    with pytest.raises(DataError, match="no row was scored"):
        _ = totals.row_accuracy


# -- long rows ---------------------------------------------------------------------------------------------------------


def long_rows(ids=None):
    """Three rows of 41 tokens; ``ids`` (3 41) marks documents and padding."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(0, 257, (2, 3, 41), generator=generator)
    targets[torch.rand(3, 41, generator=generator) < 0.5] = -100
    segments = None if ids is None else Segments.from_ids(ids)
    if ids is not None:
        targets[ids == 0] = -100
    side = Rows()
    side.batches = [Batch(inputs, targets, segments, int((targets != -100).sum()))]
    return side


def marked(case):
    """Rows that end early; with pads in front and a gap; of documents that end at, before and behind a cut."""
    ids = torch.ones(3, 41, dtype=torch.int64)
    if case == "ends":
        ids[0, 5:], ids[1, 16:], ids[2, 40:] = 0, 0, 0
    if case == "gaps":
        ids[0, :9], ids[1, 7:26], ids[2, :33] = 0, 0, 0
    if case == "documents":
        ids[0, 8:], ids[0, 30:], ids[1, 9:], ids[1, 16:] = 2, 3, 2, 5
        ids[2, 4:20], ids[2, 20:] = 0, 2
    return ids


def pieces_of(n, monkeypatch):
    # The function of that name hides the module.
    monkeypatch.setattr(sys.modules["hybridtf.train.evaluate"], "LONG_ROW", n)


def lengths_of_calls(model, monkeypatch):
    seen, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **more: (seen.append(ids.shape[1]), forward(ids, **more))[1])
    return seen


@pytest.mark.parametrize("case", [None, "ends", "gaps", "documents"])
@pytest.mark.parametrize("longest", [1, 8, 13, 40, 41])
def test_long_rows_in_pieces_score_as_in_one_call(parts, monkeypatch, case, longest):
    model, side = parts[0], long_rows(None if case is None else marked(case))
    whole = evaluate(model, side, seq_len=8)
    pieces_of(longest, monkeypatch)
    calls = lengths_of_calls(model, monkeypatch)
    found = evaluate(model, side, seq_len=1)
    assert calls == [longest] * (41 // longest) + ([41 % longest] if 41 % longest else [])
    assert [s.name for s in found.by_document] == [s.name for s in whole.by_document]
    for one, other in zip(found.by_document, whole.by_document, strict=True):
        assert one.totals.nats == pytest.approx(other.totals.nats, rel=1e-9)
        assert replace(one.totals, nats=0.0) == replace(other.totals, nats=0.0)
    assert found.n_tokens == side.batches[0].n_tokens


def test_the_pieces_of_a_row_know_what_came_before(parts, monkeypatch):
    """Each document alone, scored by a model of which no state is carried: what pieces must give."""
    model, ids = parts[0], marked("documents")
    side = long_rows(ids)
    pieces_of(8, monkeypatch)
    found = evaluate(model, side, seq_len=8)
    model.eval()
    for row, score in enumerate(found.by_document):
        expected = 0.0
        for document in set(ids[row].tolist()) - {0}:
            mask = ids[row] == document
            expected += nats_of(model, side.batches[0].inputs[row][mask], side.batches[0].targets[row][mask])
        assert score.totals.nats == pytest.approx(expected, rel=1e-9)


def test_rows_up_to_the_trained_length_are_read_in_one_call(parts, monkeypatch):
    calls = lengths_of_calls(parts[0], monkeypatch)
    pieces_of(8, monkeypatch)
    evaluate(parts[0], long_rows(), seq_len=41)
    assert calls == [41]


@pytest.mark.parametrize("why", ["cannot", "prefix"])
def test_what_cannot_be_cut_is_read_in_one_call(parts, monkeypatch, why):
    model, side = parts[0], long_rows(marked("ends"))
    if why == "cannot":
        model.stack.blocks()[1].mixer.cannot = {"cut": "it turns by the running length"}
    else:
        ids = side.batches[0].segments.ids
        marks = Segments.from_ids(ids, prefix_len=torch.where(ids > 0, 3, 0))
        side.batches = [replace(side.batches[0], segments=marks)]
    calls = lengths_of_calls(model, monkeypatch)
    pieces_of(8, monkeypatch)
    evaluate(model, side, seq_len=8)
    assert calls == [41]


@pytest.mark.parametrize("max_tokens", [1, 200, 383, 384])
def test_a_cap_takes_the_same_share_of_every_group(max_tokens):
    sizes = [{"length": 8, "n_pairs": 2, "n_rows": 64}, {"length": 16, "n_pairs": 4, "n_rows": 64}]
    side = MQARConfig(vocab_size=32, train=sizes[:1], test=sizes).load(0)
    block = {"mixer": {"type": "attention", "n_heads": 2}}
    model = LanguageModelConfig(vocab_size=32, d_model=8, pattern="a", blocks={"a": block}).build()
    result = evaluate(model, side, seq_len=8, batch_size=8, max_tokens=max_tokens)
    rows = [len(scores) for scores in result.by_group.values()]
    assert rows == {1: [8, 8], 200: [32, 32], 383: [56, 56], 384: [64, 64]}[max_tokens]
    assert result.complete == (max_tokens == 384)


def test_wrong_sizes_are_refused(parts):
    for options in ({"max_tokens": 0}, {"seq_len": 0}, {"batch_size": 0}, {"seq_len": 8, "stride": 9}, {"stride": 0}):
        with pytest.raises(ConfigError):
            evaluate(*parts, **options)


def test_a_loss_that_is_not_finite_is_no_result(parts):
    model, side = parts
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"the loss of .* is not finite"):
        evaluate(model, side, seq_len=32)


def test_progress_is_told(parts):
    seen = []
    result = evaluate(*parts, seq_len=16, batch_size=2, on_batch=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == result.n_tokens


def test_a_state_is_not_carried_where_a_part_cannot_be_cut(parts):
    model, side = parts
    model.stack.blocks()[1].mixer.cannot = {"cut": "it turns by the running length"}
    with pytest.raises(ConfigError, match=r"context = 'document'.*layers\.1\.mixer \(Attention\) says: it turns by"):
        evaluate(model, side, context="document")
    assert evaluate(model, side).complete


def test_a_run_says_before_it_starts_that_no_state_can_be_carried(tmp_path):
    scaling = {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 8, "mode": "running"}
    mixer = {"type": "attention", "n_heads": 2, "position": {"type": "rope", "scaling": scaling}}
    made = recipe(tmp_path, model={"pattern": "a", "blocks": {"a": {"mixer": mixer}}}, eval_context="document", eval_tokens=50)
    with pytest.raises(ConfigError, match="context = 'document', which carries the state, is not possible"):
        run(made, tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()
