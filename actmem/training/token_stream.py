"""The corpus as two arrays of token ids on disk, training and held out, made once and mapped into memory.

The arrays are raw little-endian uint32 in `cache_dir`, named by a hash of what decides them: the corpus, the tokenizer
and the held-out share. A file's length is checked against the count beside it; a pair that does not fit is made again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actmem.config.schema import DataConfig
from actmem.training.corpus import Corpus, Passage
from actmem.training.tokenizing import Tokenizer

Tokens = NDArray[np.uint32]
_BATCH_PASSAGES = 256
_SIDES = ("train", "eval")


@dataclass(frozen=True)
class TokenStream:
    """Token ids of the training and the held-out text, files parted by the separator; read-only memory maps."""

    train: Tokens
    held_out: Tokens
    identity: str


def open_token_stream(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> TokenStream:
    """The tokens of `corpus`, from `config.cache_dir` where they are there and whole."""
    identity = hashlib.sha256(f"{corpus.identity} {tokenizer.identity} {config.eval_share}".encode()).hexdigest()[:16]
    directory = config.cache_dir / f"tokens-{identity}"
    if not _is_whole(directory):
        _build(directory, config, corpus, tokenizer)
    train, held_out = (_map(directory / f"{side}.u32") for side in _SIDES)
    return TokenStream(train, held_out, identity)


def _is_whole(directory: Path) -> bool:
    try:
        counts = json.loads((directory / "counts.json").read_text())
        return all((directory / f"{side}.u32").stat().st_size == 4 * counts[side] for side in _SIDES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(directory: Path, config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "counts.json").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        counts = _write(Path(scratch), config, corpus, tokenizer)
        for side in _SIDES:
            (Path(scratch) / f"{side}.u32").replace(directory / f"{side}.u32")
        # Last, so that counts stand only beside arrays that are whole.
        (Path(scratch) / "counts.json").write_text(json.dumps(counts))
        (Path(scratch) / "counts.json").replace(directory / "counts.json")


def _write(directory: Path, config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, int]:
    counts = dict.fromkeys(_SIDES, 0)
    with (directory / "train.u32").open("wb") as train, (directory / "eval.u32").open("wb") as held_out:
        files = dict(zip(_SIDES, (train, held_out), strict=True))
        for passage, ids in _encoded(corpus.passages(), tokenizer):
            side = "eval" if passage.is_held_out(config.eval_share) else "train"
            tokens = [*ids, tokenizer.separator_id] if passage.ends_file else ids
            files[side].write(np.asarray(tokens, dtype="<u4").tobytes())
            counts[side] += len(tokens)
    return counts


def _encoded(passages: Iterable[Passage], tokenizer: Tokenizer) -> Iterator[tuple[Passage, list[int]]]:
    remaining = iter(passages)
    while batch := list(itertools.islice(remaining, _BATCH_PASSAGES)):
        yield from zip(batch, tokenizer.encode([passage.text for passage in batch]), strict=True)


def _map(path: Path) -> Tokens:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype="<u4", mode="r") if path.stat().st_size else np.zeros(0, dtype="<u4")
