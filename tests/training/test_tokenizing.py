from __future__ import annotations

from pathlib import Path

import pytest

from actmem.config.schema import DataConfig
from actmem.errors import DataError
from actmem.training.corpus import open_corpus
from actmem.training.tokenizing import SEPARATOR, open_tokenizer

TEXT = "def naïve(x):\n\treturn '🙂' + x  # \x07 ünïcode\n"


def test_trained_tokenizer_gives_every_text_back(data: DataConfig) -> None:
    tokenizer = open_tokenizer(data, open_corpus(data.path))
    [ids] = tokenizer.encode([TEXT])
    assert tokenizer.fast.decode(ids) == TEXT
    assert tokenizer.vocab_size == 400
    assert tokenizer.fast.convert_ids_to_tokens(tokenizer.separator_id) == SEPARATOR


def test_trained_tokenizer_is_read_from_the_cache_the_second_time(data: DataConfig, tmp_path: Path) -> None:
    config = data.model_copy(update={"cache_dir": tmp_path})
    corpus = open_corpus(config.path)
    first = open_tokenizer(config, corpus)
    [cached] = tmp_path.glob("tokenizer-*.json")
    before = cached.stat()
    assert open_tokenizer(config, corpus).identity == first.identity
    assert cached.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"\xff" + data, lambda data: b"", None])
def test_a_damaged_cache_is_made_again(data: DataConfig, tmp_path: Path, damage: object) -> None:
    config = data.model_copy(update={"cache_dir": tmp_path})
    corpus = open_corpus(config.path)
    first = open_tokenizer(config, corpus)
    [cached] = tmp_path.glob("tokenizer-*.json")
    good = cached.read_bytes()
    # Valid JSON with two words changed is damage too.
    cached.write_bytes(damage(good) if callable(damage) else good.replace(b"self", b"slef"))
    assert open_tokenizer(config, corpus).identity == first.identity
    assert cached.read_bytes() == good
    assert list(tmp_path.iterdir()) == [cached]


def test_vocabulary_size_and_corpus_have_caches_of_their_own(data: DataConfig, tmp_path: Path) -> None:
    config = data.model_copy(update={"cache_dir": tmp_path})
    other = config.model_copy(update={"vocab_size": 300, "path": config.path[:1]})
    open_tokenizer(config, open_corpus(config.path))
    assert open_tokenizer(other, open_corpus(other.path)).vocab_size == 300
    assert len(list(tmp_path.glob("tokenizer-*.json"))) == 2


def test_a_local_directory(data: DataConfig, tmp_path: Path) -> None:
    corpus = open_corpus(data.path)
    trained = open_tokenizer(data, corpus)
    trained.fast.save_pretrained(tmp_path)
    loaded = open_tokenizer(data.model_copy(update={"tokenizer": tmp_path}), corpus)
    assert loaded.encode([TEXT]) == trained.encode([TEXT])
    assert loaded.separator_id == trained.separator_id


def test_a_local_directory_without_end_of_text_token(data: DataConfig, tmp_path: Path) -> None:
    corpus = open_corpus(data.path)
    fast = open_tokenizer(data, corpus).fast
    fast.eos_token = None
    fast.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-text token"):
        open_tokenizer(data.model_copy(update={"tokenizer": tmp_path}), corpus)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"], ids=["missing", "cut short", "a list", "empty"])
def test_a_local_directory_that_is_no_tokenizer(data: DataConfig, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"holds no tokenizer that can be read.*tokenizer\.json"):
        open_tokenizer(data.model_copy(update={"tokenizer": tmp_path}), open_corpus(data.path))


def test_a_local_directory_that_is_not_there(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a directory"):
        open_tokenizer(data.model_copy(update={"tokenizer": tmp_path / "nowhere"}), open_corpus(data.path))
