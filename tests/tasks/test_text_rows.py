"""Tasks over text: the decoded row is read with regular expressions, and must hold the answers that are scored."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import (
    IGNORE,
    NO_EVIDENCE,
    ByteTokenizer,
    CommonWordsTextConfig,
    FrequentWordsTextConfig,
    NeedlesTextConfig,
    TextRowsTask,
    Totals,
    VariableTrackingTextConfig,
    make_tokenizer,
)
from hybridtf.tasks.synthetic import Rows
from hybridtf.tasks.text_rows import NOISE, Bank, sentences, spell
from tests.tasks.rows import rows_of


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    """A byte-level tokenizer trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    text = [" ".join([*NOISE, *(f"{i}. {spell(i * 977)} = {i * 31}," for i in range(300))])]
    tokenizer.train_from_iterator(text, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def texts_of(task: TextRowsTask, n: int = 60):
    """(text, answers) of training rows and of all held-out ones: the answers as they are scored, one string each."""
    tokenizer = task.config._tokenizer()
    for batch in [next(task.train_batches(n, task.row_length)), *task.eval_batches(30, task.row_length)]:
        assert batch.segments is not None
        lengths = batch.segments.real.sum(1)
        for row in range(len(batch.inputs)):
            inputs, targets = batch.inputs[row, : lengths[row]], batch.targets[row, : lengths[row]]
            assert inputs[0] == tokenizer.bos_id
            tokens = [*inputs[1:].tolist(), int(targets[-1])]
            scored = targets != IGNORE
            assert (targets[scored] == torch.tensor(tokens)[scored]).all()
            answers = batch.answers[row, : lengths[row]]
            said = [tokenizer.decode(targets[scored & (answers == i)].tolist()) for i in range(int(answers.max()) + 1)]
            yield tokenizer.decode(tokens), said, int(lengths[row])


def both(tokenizer: str, bpe: str) -> dict[str, str]:
    return {} if tokenizer == "bytes" else {"tokenizer": bpe}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize(("counts", "options"), [
    ((1, 1, 1), {}), ((4, 1, 1), {"haystack": "corpus", "source": "pydoc"}), ((1, 4, 1), {}), ((4, 1, 4), {}),
    ((3, 2, 2), {"keys": "numbers", "values": "words", "n_digits": 4}),
    ((2, 1, 1), {"keys": "uuids", "values": "uuids"}),
], ids=str)
def test_needles_are_found_by_their_words(counts, options, tokenizer, bpe) -> None:
    size = {"length": 1400, **dict(zip(("n_keys", "n_values", "n_queries"), counts, strict=True))}
    config = NeedlesTextConfig(
        **options, **both(tokenizer, bpe), train=[{**size, "n_rows": 60}], test=[{**size, "length": 1500, "n_rows": 20}]
    )
    noun = {"words": "word", "uuids": "uuid"}.get(config.values, "number")
    asked_at, full = set(), []
    for text, said, length in texts_of(config.load()):
        found = re.findall(rf"One of the special magic {noun}s for ([\w-]+) is: ([\w-]+)\.", text)
        assert len(found) == counts[0] * counts[1]
        assert len({key for key, _ in found}) == counts[0]
        question = re.search(rf"\nWhat (?:is|are all) the special magic {noun}s? for (.+) mentioned in the text\? ", text)
        keys = re.split(", | and ", question[1])
        assert len(set(keys)) == counts[2]
        assert said == [f" {value}" for key in keys for k, value in found if k == key]
        assert text.endswith((" It is" if len(said) == 1 else " They are") + ",".join(said))
        if "haystack" not in options:
            rest = re.sub(rf" One of the special magic {noun}s for [\w-]+ is: [\w-]+\.", "", text)
            filler = rest[rest.index("\n") + 1 : rest.rindex("\n")]
            assert (" " + " ".join(NOISE * 40)).startswith(filler)
        asked_at.add([key for key, _ in found].index(keys[0]))
        full.append(length)
    assert 1400 < max(full) <= 1500
    assert min(full) > 1400 - 300  # less than a sentence is missing
    assert len(asked_at) >= min(2, counts[0])


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_passkey_lies_at_its_depth(depth) -> None:
    config = NeedlesTextConfig(
        form="passkey", train=[{"length": 2000, "n_rows": 30}], test=[{"length": 2000, "n_rows": 20, "depth": depth}]
    )
    places, numbers = [], []
    for text, said, _ in texts_of(config.load(), 30):
        number = re.search(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\.", text)
        assert said == [f" {number[1]}"]
        assert text.startswith("There is an important info hidden inside a lot of irrelevant text. Find it and memorize them.")
        assert text.endswith(f"\nWhat is the pass key? The pass key is {number[1]}")
        around = text[: number.start()], text[number.end() :]
        before, after = (len(re.findall("|".join(map(re.escape, NOISE)), part)) for part in around)
        places.append(before / (before + after))
        numbers.append(int(number[1]))
    assert places[30:] == pytest.approx([depth] * 20, abs=0.03)
    assert np.ptp(places[:30]) > 0.6  # without a depth: anywhere
    assert 1 <= min(numbers) < max(numbers) <= 50_000


def test_filler_of_a_corpus_is_of_other_documents_on_the_held_out_side(tmp_path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(" ".join(f"Sentence {j} of document {i} is here." for j in range(20)))
    config = NeedlesTextConfig(
        haystack="corpus", source=str(tmp_path), train=[{"length": 1500, "n_rows": 100}], test=[{"length": 1500, "n_rows": 40}]
    )
    rows = [re.findall(r" Sentence (\d+) of document (\d+) is here\.", text) for text, _, _ in texts_of(config.load(), 100)]
    sides = [{document for row in part for _, document in row} for part in (rows[:100], rows[100:])]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0] | sides[1]) == 30
    for row in rows:  # one sentence after the other, as in the documents
        assert all(int(b) in (int(a) + 1, 0) for (a, _), (b, _) in itertools.pairwise(row))
    assert len({row[0] for row in rows}) > 60  # from any sentence on


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize(("n_chains", "n_hops"), [(1, 4), (2, 1), (3, 0)])
def test_variables_are_followed_through_the_text(n_chains, n_hops, tokenizer, bpe) -> None:
    size = {"length": 900, "n_chains": n_chains, "n_hops": n_hops}
    config = VariableTrackingTextConfig(**both(tokenizer, bpe), train=[{**size, "n_rows": 60}], test=[{**size, "n_rows": 30}])
    firsts = set()
    for text, said, _ in texts_of(config.load()):
        value: dict[str, str] = {}
        for name, right in re.findall(r" VAR (\w{5}) = (?:VAR )?(\w{5})\.", text):
            assert name not in value
            value[name] = right if right.isdigit() else value[right]
        assert len(value) == n_chains * (n_hops + 1)
        number = re.search(r"assigned the value (\d{5}) in the text\. They are", text)[1]
        assert [s.strip() for s in said] == [name for name, v in value.items() if v == number]
        firsts.add(list(value.values()).index(number))
    assert len(firsts) >= min(2, n_chains)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_common_words_are_counted(tokenizer, bpe) -> None:
    counts = {"n_words": 3, "n_common": 7, "n_rare": 2}
    sizes = {"train": [{"length": 1000, "n_rows": 40, **counts}], "test": [{"length": 1300, "n_rows": 20, **counts}]}
    for text, said, length in texts_of(CommonWordsTextConfig(**both(tokenizer, bpe), **sizes).load(), 40):
        items = re.findall(r" (\d+)\. ([a-z]+)", text[: text.rindex("\n")])
        assert [int(i) for i, _ in items] == list(range(1, len(items) + 1))
        found = Counter(word for _, word in items)
        assert [s.strip() for s in said] == [word for word, n in found.items() if n == 7]
        assert len(said) == 3
        assert sorted(n for n in found.values() if n != 7)[1:] == [2] * (len(found) - 4)
        assert length > 960


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_frequent_words_are_counted(tokenizer, bpe) -> None:
    sizes = {"train": [{"length": 1000, "n_rows": 40}], "test": [{"length": 1300, "n_rows": 20}]}
    for text, said, length in texts_of(FrequentWordsTextConfig(**both(tokenizer, bpe), **sizes).load(), 40):
        ranked = Counter(text.split("\n")[1].split()).most_common()
        assert [s.strip() for s in said] == [word for word, _ in ranked[:3]]
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
        assert length > 960


def test_training_on_all_tokens_leaves_the_held_out_side_as_it_is() -> None:
    sizes = {"train": [{"length": 400, "n_rows": 20}], "test": [{"length": 400, "n_rows": 20}]}
    tasks = [NeedlesTextConfig(form="passkey", train_on=what, **sizes).load() for what in ("answers", "all")]
    batch = next(tasks[1].train_batches(8, 400))
    lengths = batch.segments.real.sum(1)
    for row in range(8):
        assert (batch.targets[row, : lengths[row] - 1] == batch.inputs[row, 1 : lengths[row]]).all()
    assert batch.n_tokens == int(lengths.sum())
    for one, other in zip(*(task.eval_batches(8, 400) for task in tasks), strict=True):
        assert torch.equal(one.targets, other.targets)


def shown_in(batch, tokenizer):
    """Of each row (text that was read, [(answer, text up to the end of its evidence, positions)]); asserts that evidence shows
    the very token, stands where an answer is scored alone, and lies before where it is said."""
    assert batch.evidence is not None
    rows = zip(batch.inputs, batch.targets, batch.answers, batch.evidence, batch.segments.real.sum(1), strict=True)
    for inputs, targets, answers, evidence, length in rows:
        assert (evidence[answers < 0] == NO_EVIDENCE).all()
        found = []
        for i in range(int(answers.max()) + 1):
            (columns,) = torch.nonzero(answers == i, as_tuple=True)
            places = evidence[columns]
            if bool((places == NO_EVIDENCE).all()):
                found.append((tokenizer.decode(targets[columns].tolist()), None, []))
                continue
            assert (inputs[places] == targets[columns]).all()
            assert (places.diff() == 1).all()
            assert (places <= columns).all()
            found.append((tokenizer.decode(targets[columns].tolist()), tokenizer.decode(inputs[1 : places[-1] + 1].tolist()),
                          places.tolist()))
        yield tokenizer.decode(inputs[1:length].tolist()), found


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("options", [
    {}, {"haystack": "corpus", "source": "pydoc"}, {"keys": "numbers", "n_digits": 3}, {"values": "words"}, {"train_on": "all"},
], ids=str)
def test_evidence_of_needles_is_the_value_in_its_sentence(options, tokenizer, bpe) -> None:
    size = {"length": 1400, "n_keys": 3, "n_values": 2, "n_queries": 2, "n_rows": 20}
    config = NeedlesTextConfig(**options, **both(tokenizer, bpe), train=[size], test=[size])
    (batch,) = config.load().eval_batches(20, 1400)
    n_found = 0
    for text, found in shown_in(batch, config._tokenizer()):
        noun = "word" if config.values == "words" else "number"
        question = re.search(rf"\nWhat are all the special magic {noun}s for (.+) mentioned", text)
        wanted = [
            (m[1], m.end(1)) for key in re.split(", | and ", question[1])
            for m in re.finditer(rf" One of the special magic {noun}s for {key} is:( \w+)\.", text)
        ]
        for (answer, read, places), (value, end) in zip(found, wanted, strict=True):
            assert answer == value
            if read is None:
                continue
            n_found += 1
            assert read == text[:end]
            if tokenizer == "bytes":
                last = len(text[:end].encode())  # the first token is that of the beginning
                assert places == list(range(last - len(value) + 1, last + 1))
    assert n_found == 80 if tokenizer == "bytes" else n_found > 20


def test_evidence_of_a_passkey_and_of_variables() -> None:
    size = {"length": 600, "n_rows": 15}
    passkey = NeedlesTextConfig(form="passkey", train=[size], test=[size])
    (batch,) = passkey.load().eval_batches(15, 600)
    for text, ((answer, read, _),) in shown_in(batch, ByteTokenizer()):
        assert read == text[: text.index(f"Remember it.{answer} is the pass key") + len("Remember it.") + len(answer)]
    size |= {"n_chains": 2, "n_hops": 2}
    chains = VariableTrackingTextConfig(train=[size], test=[size])
    (batch,) = chains.load().eval_batches(15, 600)
    for text, found in shown_in(batch, ByteTokenizer()):
        assert len(found) == 3
        for answer, read, _ in found:
            assert read == text[: text.index(f" VAR{answer} = ") + len(" VAR") + len(answer)]


def test_words_that_are_counted_have_no_evidence() -> None:
    for config in (CommonWordsTextConfig.tiny(), FrequentWordsTextConfig.tiny()):
        assert next(config.load().eval_batches(4, 400)).evidence is None


def test_half_the_answers_right_is_half() -> None:
    """Every second answer has its last token wrong."""
    from hybridtf.bench import Subject, measure_quality

    size = {"length": 800, "n_keys": 1, "n_values": 4, "n_rows": 6}
    task = NeedlesTextConfig(train=[size], test=[size]).load()
    (batch,) = task.eval_batches(6, 800)
    last = (batch.answers % 2 == 1) & (batch.targets != IGNORE) & (batch.answers != batch.answers.roll(-1, 1))
    said = torch.where(last, (batch.targets + 1) % 257, batch.targets).clamp(min=0)
    model = torch.nn.Linear(1, 1)
    model.forward = lambda ids, segments=None: torch.nn.functional.one_hot(said, 257).double()  # type: ignore[method-assign]
    found = measure_quality(Subject("half", lambda: model, vocab_size=257), model, task, seq_len=800)
    assert (found["metric"], found["value"]) == ("answer_accuracy", 0.5)
    low, high = found["interval"]
    assert 0.2 < low < 0.5 < high < 0.8
    assert (found["units"]["n_answers"], found["units"]["n_answers_correct"]) == (4, 2)


def test_rows_take_what_is_optional_by_name_alone() -> None:
    one = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(TypeError, match="positional"):
        Rows(one, one, one[:, 0])


def test_answers_are_counted_one_by_one() -> None:
    """A model that says the first of four values, and one digit of the others wrong: a quarter of the answers, no row."""
    from hybridtf.train.evaluate import _score_batch, _Scorer

    size = {"length": 800, "n_keys": 1, "n_values": 4, "n_rows": 6}
    task = NeedlesTextConfig(train=[size], test=[size]).load()
    (batch,) = task.eval_batches(6, 800)
    assert batch.per_row == 4

    class Said(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, inputs, **_):
            wanted = batch.targets.clamp(min=0)
            last = (batch.answers > 0) & (batch.answers != batch.answers.roll(-1, 1))
            wanted = torch.where(last, (wanted + 1) % 257, wanted)
            logits = torch.nn.functional.one_hot(wanted, 257).double()
            return type("Out", (), {"logits": logits, "state": None})()

    scorer = _Scorer(Said(), "fp32", None)
    _score_batch(scorer, batch, 4096)
    total = sum((scorer.sums.row_totals(row, 4) for row in range(6)), Totals())
    assert (total.n_answers, total.n_answers_correct, total.n_rows, total.n_rows_correct) == (24, 6, 6, 0)
    metrics = task.metrics(total)
    assert metrics["answer_accuracy"] == 0.25
    assert metrics["row_accuracy"] == 0.0
    assert metrics["accuracy"] == pytest.approx(1 - 18 / (24 * 8))


def test_the_grid_of_lengths_and_depths_is_groups() -> None:
    config = active()["tasks"].make({"type": "passkey_text_small"})
    assert len({size.name for size in config.test}) == 20
    assert config.test[-1].name == "4096 tokens, depth 1"
    assert config.baselines() == {"chance": 1 / 50_000}


def test_a_bank_wraps_round() -> None:
    bank = Bank.of(ByteTokenizer(), ["aa", "bbb", "c"])
    fits = bank.fits(np.array([0, 1, 2, 2]), np.array([5, 3, 8, 0]))
    assert fits.tolist() == [2, 1, 4, 0]  # c aa bbb c is 7, and another aa would be 9


def test_baselines_are_what_guesses_reach() -> None:
    """A constant guess is right as often as ``chance`` says, a value of the row's own as often as ``own``."""
    size = {"length": 420, "n_keys": 3, "n_rows": 1500}
    config = NeedlesTextConfig(n_digits=1, train=[size], test=[size])
    constant = own = 0
    for text, said, _ in [*texts_of(config.load(), 1)][1:]:
        values = re.findall(r" is: (\d)\.", text)
        assert len(set(values)) == 3
        constant += said == [" 5"]
        own += said == [f" {values[1]}"]
    assert constant / 1500 == pytest.approx(config.baselines()["chance"], abs=4 * (1 / 9 * 8 / 9 / 1500) ** 0.5)
    assert own / 1500 == pytest.approx(config.baselines()["own"], abs=4 * (1 / 3 * 2 / 3 / 1500) ** 0.5)


def test_words_can_be_said_and_differ() -> None:
    words = {spell(i) for i in range(0, 343_000, 7)}
    assert len(words) == 49_000
    assert all(re.fullmatch(r"([bdfgklmnprstvz][aeiou]){3}", word) for word in words)


def test_sentences() -> None:
    text = "One is here.\n  Two is\nthere!  Short. " + "long " * 80 + ". No end"
    assert sentences(text) == ["One is here.", "Two is there!"]


@pytest.mark.parametrize(("options", "match"), [
    ({"type": "needles_text", "form": "passkey", "train": [{"length": 400, "n_rows": 5, "n_keys": 2}]}, "one key and one"),
    ({"type": "needles_text", "n_digits": 1, "train": [{"length": 4000, "n_rows": 5, "n_keys": 10}]}, "10 different numbers"),
    ({"type": "variable_tracking_text", "train": [{"length": 4000, "n_rows": 5, "n_asked": 2}]}, "asks for one chain"),
    ({"type": "common_words_text", "train": [{"length": 900, "n_rows": 5, "n_common": 3}]}, "must be above n_rare"),
], ids=lambda x: str(x)[:40])
def test_what_cannot_be_asked_is_refused(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make(options)


@pytest.mark.parametrize(("options", "match"), [
    ({"type": "needles_text", "train": [{"length": 200, "n_rows": 5}]}, r"all but the filler takes \d+ tokens"),
    ({"type": "common_words_text", "train": [{"length": 900, "n_rows": 5}]}, "the common words alone do not fit"),
    ({"type": "frequent_words_text", "train": [{"length": 160, "n_rows": 5}]}, "does not tell 3 of them apart"),
    ({"type": "needles_text", "bos_token": "<s>"}, "belongs to a tokenizer file"),
], ids=lambda x: str(x)[:40])
def test_what_does_not_fit_is_refused_when_it_is_loaded(options, match) -> None:
    with pytest.raises(ConfigError, match=match):
        active()["tasks"].make(options).load()


def test_a_tokenizer_that_changes_pieces_is_refused(tmp_path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "is": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    assert make_tokenizer(str(path)).vocab_size == 3
    with pytest.raises(ConfigError, match="use one that keeps every character"):
        NeedlesTextConfig(tokenizer=str(path)).load()


def test_no_row_of_the_held_out_side_is_trained_on() -> None:
    sizes = {"train": [{"length": 330, "n_rows": 2000}], "test": [{"length": 330, "n_rows": 300}]}
    task = NeedlesTextConfig(form="passkey", **sizes).load()
    rows = [tuple(inputs) + tuple(targets) for inputs, targets in rows_of(task, 2000)]
    assert set(rows[:2000]).isdisjoint(rows[2000:])
    assert len(set(rows[2000:])) > 290
