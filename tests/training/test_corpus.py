from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from actmem.errors import DataError
from actmem.training.corpus import PASSAGE_CHARACTERS, open_corpus


def test_files_are_sorted_found_once_and_in_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    paths = [tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "deep" / "er" / "c.txt"]
    for path in paths:
        path.write_text(path.name)
    corpus = open_corpus([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"])
    assert list(corpus.files) == sorted(paths)
    assert [passage.text for passage in corpus.passages()] == ["a.txt", "b.txt", "c.txt"]


def test_passages_are_the_text_whole_lines_and_bounded() -> None:
    path = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    passages = list(open_corpus([str(path)]).passages())
    assert "".join(passage.text for passage in passages) == path.read_text()
    assert all(len(passage.text) <= PASSAGE_CHARACTERS and passage.text.endswith("\n") for passage in passages)
    assert [passage.ends_file for passage in passages] == [False] * (len(passages) - 1) + [True]
    assert len(passages) > 3


def test_a_line_longer_than_a_passage_is_cut(tmp_path: Path) -> None:
    text = "é" * (2 * PASSAGE_CHARACTERS + 5)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    passages = list(open_corpus([str(tmp_path / "long.txt")]).passages())
    assert [len(passage.text) for passage in passages] == [PASSAGE_CHARACTERS, PASSAGE_CHARACTERS, 5]


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    with pytest.raises(DataError) as caught:
        open_corpus([f"{tmp_path}/*.txt", f"{tmp_path}/*.md", f"{tmp_path}/no/**/*"])
    message = str(caught.value)
    assert "*.md' matches no file" in message
    assert "no/**/*' matches no file" in message
    assert "latin.txt is not UTF-8 text" in message
    assert "binary.txt is not UTF-8 text: it holds NUL bytes" in message
    assert "good.txt" not in message


def test_only_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="all 1 files are empty"):
        open_corpus([f"{tmp_path}/*.txt"])


def test_identity_follows_the_text_not_the_names(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_corpus([str(path)]).identity
    path = path.rename(tmp_path / "b.txt")
    assert open_corpus([str(path)]).identity == before
    path.write_text("two")
    assert open_corpus([str(path)]).identity != before


def test_what_is_held_out_stays_held_out_when_files_come_and_go() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    small, large = open_corpus([f"{stdlib}/json/*.py"]), open_corpus([f"{stdlib}/json/*.py", f"{stdlib}/*.py"])
    held_out = {passage.text for passage in large.passages() if passage.is_held_out(0.3)}
    all_passages = list(large.passages())
    assert all(passage.is_held_out(0.3) == (passage.text in held_out) for passage in small.passages())
    assert 0.25 < len(held_out) / len(all_passages) < 0.35
    assert not any(passage.is_held_out(0.0) for passage in all_passages)
