from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actmem.config.schema import DataConfig
from actmem.training.corpus import open_corpus
from actmem.training.token_stream import TokenStream, open_token_stream
from actmem.training.tokenizing import open_tokenizer


def opened(config: DataConfig) -> TokenStream:
    corpus = open_corpus(config.path)
    return open_token_stream(config, corpus, open_tokenizer(config, corpus))


def test_both_sides_hold_their_passages_and_a_separator_after_each_file(data: DataConfig) -> None:
    corpus = open_corpus(data.path)
    tokenizer = open_tokenizer(data, corpus)
    stream = open_token_stream(data, corpus, tokenizer)
    for side, held_out in ((stream.train, False), (stream.held_out, True)):
        passages = [passage for passage in corpus.passages() if passage.is_held_out(data.eval_share) == held_out]
        text = "".join(passage.text for passage in passages)
        without = side[side != tokenizer.separator_id]
        assert tokenizer.fast.decode(without.tolist()) == text
        assert (side == tokenizer.separator_id).sum() == sum(passage.ends_file for passage in passages)


def test_nothing_held_out(data: DataConfig) -> None:
    assert len(opened(data.model_copy(update={"eval_share": 0.0})).held_out) == 0


def test_it_is_mapped_from_disk_and_not_made_twice(data: DataConfig, tmp_path: Path) -> None:
    config = data.model_copy(update={"cache_dir": tmp_path})
    first = opened(config)
    assert isinstance(first.train, np.memmap)
    [path] = tmp_path.glob("tokens-*/train.u32")
    before = path.stat().st_mtime_ns
    assert np.array_equal(opened(config).train, first.train)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["train.u32", "eval.u32", "counts.json"])
@pytest.mark.parametrize("remove", [True, False], ids=["removed", "cut short"])
def test_a_damaged_cache_is_made_again(data: DataConfig, tmp_path: Path, name: str, remove: bool) -> None:
    config = data.model_copy(update={"cache_dir": tmp_path})
    first = np.array(opened(config).train)
    [path] = tmp_path.glob(f"tokens-*/{name}")
    content = path.read_bytes()
    path.unlink() if remove else path.write_bytes(content[:-5])
    assert np.array_equal(opened(config).train, first)
    assert path.read_bytes() == content
