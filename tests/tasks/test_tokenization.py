import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.core.errors import DataError
from hybridtf.tasks.tokenization import ByteTokenizer, FileTokenizer, make_tokenizer

TEXT = "The cat sat on the mat. Déjà vu! 😀🎉 naïve café, the cat, the mat.\n\tIndented  twice  日本語"


@given(st.text(max_size=60))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(ids) == text
    assert tokenizer.prompt(text).tolist() == [256, *text.encode()]


@given(st.binary(max_size=40), st.integers(1, 5))
def test_streamed_bytes_give_what_all_at_once_gives(data: bytes, step: int) -> None:
    tokenizer = ByteTokenizer()
    decoder = tokenizer.decoder()
    for _ in range(2):  # the second time: the decoder is as new
        pieces = [decoder.push(data[i : i + step]) for i in range(0, len(data), step)]
        assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(data)


def test_a_character_comes_when_it_is_complete() -> None:
    decoder = ByteTokenizer().decoder()
    assert [decoder.push([b]) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert decoder.push([256, 65, 256]) == "A"
    assert decoder.push("😀".encode()[:2]) == ""
    assert decoder.finish() == "\ufffd"
    with pytest.raises(DataError, match="257 is not an id; allowed are 0 to 256"):
        decoder.push([257])


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose own template puts <s> first, so that a start token could be added twice."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_file_tokenizer_adds_one_start_token_and_no_other(bpe: Path) -> None:
    tokenizer = FileTokenizer(str(bpe), "<s>")
    ids = tokenizer.prompt(TEXT).tolist()
    assert ids[0] == tokenizer.bos_id == 0
    assert ids.count(0) == 1
    assert 1 not in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == 300
    (spelled,) = tokenizer.encode([b"a <s> b</s>"])
    assert not np.isin(spelled, [0, 1]).any(), "text that spells a special token must stay text"
    assert tokenizer.decode(spelled) == "a <s> b</s>"


def test_file_tokenizer_without_a_start_token_gets_an_id_of_its_own(bpe: Path) -> None:
    tokenizer = FileTokenizer(str(bpe))
    assert (tokenizer.bos_id, tokenizer.vocab_size, tokenizer.dtype) == (300, 301, np.uint16)
    assert tokenizer.prompt("").tolist() == [300]
    assert tokenizer.fingerprint != FileTokenizer(str(bpe), "<s>").fingerprint
    with pytest.raises(DataError, match="301 is not an id; allowed are 0 to 300"):
        tokenizer.decode([301])


def test_streamed_tokens_give_what_all_at_once_gives(bpe: Path) -> None:
    tokenizer = FileTokenizer(str(bpe))
    for text in (TEXT, "😀" * 5, "x日", ""):
        ids = tokenizer.prompt(text).tolist()
        decoder = tokenizer.decoder()
        pieces = [decoder.push([i]) for i in ids]
        assert "".join([*pieces, decoder.finish()]) == text
        assert all("\ufffd" not in piece for piece in pieces)
    (ids_of_face,) = tokenizer.encode(["\U0001f680".encode()])
    decoder = tokenizer.decoder()
    assert decoder.push(ids_of_face[:2].tolist()) == ""
    assert "\ufffd" in decoder.finish()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is no file"), ("{", "not a tokenizers JSON file"), ("{}", "not a tokenizers JSON file")],
)
def test_bad_files(tmp_path: Path, content, message) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        make_tokenizer(str(path))


def test_unknown_names(bpe: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean 'bytes'"):
        make_tokenizer("byte")
    with pytest.raises(DataError, match=r"no token '<s>>' for bos_token. Did you mean '<s>'\?"):
        make_tokenizer(str(bpe), "<s>>")
    assert isinstance(make_tokenizer("bytes"), ByteTokenizer)


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install hybridtf\[text\]"):
        make_tokenizer("t.json")
