"""A tokenizer: from a local Hugging Face directory, or a byte-level BPE trained on the corpus and kept on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actmem.config.schema import DataConfig
from actmem.errors import DataError
from actmem.training.corpus import Corpus

SEPARATOR = "<|endoftext|>"
# Enough to find the common words of a corpus; more only takes longer.
_TRAINING_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer, the token that separates files, and a hash of everything that decides its output."""

    fast: PreTrainedTokenizerFast
    separator_id: int
    identity: str

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id it can give."""
        return max(len(self.fast), self.separator_id + 1)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with no special tokens added."""
        encodings = self.fast.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def open_tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of `config.tokenizer`, or one of `config.vocab_size` entries trained on `corpus`'s training text.

    Raises `DataError` for a directory that holds no usable tokenizer.
    """
    if config.tokenizer is not None:
        return _wrap(_load(config.tokenizer), str(config.tokenizer))
    return _wrap(_trained(config, corpus), "the trained tokenizer")


def _wrap(fast: PreTrainedTokenizerFast, source: str) -> Tokenizer:
    separator_id = fast.eos_token_id
    if not isinstance(separator_id, int):
        raise DataError(
            f"the tokenizer of {source} has no end-of-text token (eos_token), which separates files; set one"
        )
    identity = hashlib.sha256(fast.backend_tokenizer.to_str().encode()).hexdigest()
    return Tokenizer(fast, separator_id, identity)


def _load(path: Path) -> PreTrainedTokenizerFast:
    if not path.is_dir():
        raise DataError(f"data.tokenizer {path} is not a directory; give a local Hugging Face tokenizer directory")
    try:
        # The tokenizers library raises a bare Exception for a broken file, so look first.
        if "model" not in json.loads((path / "tokenizer.json").read_text(encoding="utf-8")):
            raise ValueError("tokenizer.json holds no 'model'")
        fast = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.tokenizer {path} holds no tokenizer that can be read: {error}; allowed: a directory with a "
            "tokenizer.json, as save_pretrained writes it"
        ) from error
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise DataError(f"data.tokenizer {path} is a {type(fast).__name__}; allowed: fast tokenizers (tokenizer.json)")
    return fast


def _trained(config: DataConfig, corpus: Corpus) -> PreTrainedTokenizerFast:
    key = hashlib.sha256(f"{corpus.identity} {config.vocab_size} {config.eval_share}".encode()).hexdigest()[:16]
    path = config.cache_dir / f"tokenizer-{key}.json"
    text = _read_sealed(path)
    if text is None:
        text = _train(config, corpus).to_str()
        _write_sealed(path, text)
    backend = tokenizers.Tokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SEPARATOR)  # type: ignore[no-untyped-call]


def _train(config: DataConfig, corpus: Corpus) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(config, corpus), trainer)
    return tokenizer


def _training_texts(config: DataConfig, corpus: Corpus) -> Iterator[str]:
    """Training passages spread evenly over the corpus, so that a large one is sampled throughout."""
    stride = -(-corpus.num_bytes // _TRAINING_BYTES)
    texts = (passage.text for passage in corpus.passages() if not passage.is_held_out(config.eval_share))
    return itertools.islice(texts, 0, None, stride)


def _read_sealed(path: Path) -> str | None:
    """The text that `_write_sealed` wrote, or `None` where it is missing or damaged."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if hashlib.sha256(text.encode()).hexdigest() == digest else None


def _write_sealed(path: Path, text: str) -> None:
    """Text behind its own hash, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    os.replace(file.name, path)  # noqa: PTH105
