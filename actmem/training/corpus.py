"""Text files, as one deterministic stream of passages.

    globs -> files (sorted, each once) -> passages (at most 16 KiB, cut at line ends) -> train | held out

A passage, not a file, is what is held out, so that a corpus of one long file has an evaluation set too. The choice
hangs on the passage's own text: adding or renaming files moves nothing from one side to the other.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actmem.errors import DataError

PASSAGE_CHARACTERS = 16 * 1024
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Passage:
    """A piece of one file. `ends_file` marks its last piece, after which a separator stands in the token stream."""

    text: str
    ends_file: bool

    def is_held_out(self, eval_share: float) -> bool:
        """Whether this passage belongs to the evaluation set; the same for this text in every run and corpus."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:8], "big") < eval_share * 2**64


@dataclass(frozen=True)
class Corpus:
    """Files that have been read once and found to be text. `identity` is a hash of their contents, in order."""

    files: tuple[Path, ...]
    num_bytes: int
    identity: str

    def passages(self) -> Iterator[Passage]:
        """Every passage of every file, in order, reading one passage ahead at most."""
        for path in self.files:
            yield from _passages_of(path)


def open_corpus(patterns: Sequence[str]) -> Corpus:
    """The files that `patterns` match (`**` goes into subdirectories), read once to see that they are UTF-8 text.

    Raises `DataError` with every pattern that matches no file and every file that is not text.
    """
    matches = {pattern: sorted(_files_of(pattern)) for pattern in patterns}
    faults = [f"{pattern!r} matches no file" for pattern, files in matches.items() if not files]
    files = sorted({path for found in matches.values() for path in found})
    digests, num_bytes = [], 0
    for path in files:
        try:
            digest, size = _read_as_text(path)
        except (OSError, UnicodeDecodeError, _NotTextError) as error:
            faults.append(f"{path} is not UTF-8 text: {error}")
            continue
        digests.append(digest)
        num_bytes += size
    if not faults and not num_bytes:
        faults.append(f"all {len(files)} files are empty")
    if faults:
        raise DataError(_message(faults))
    return Corpus(tuple(files), num_bytes, _hash(digests))


class _NotTextError(Exception):
    """A NUL byte: valid UTF-8, yet no text."""


def _message(faults: Sequence[str]) -> str:
    listed = "\n  ".join(faults)
    return f"data.path names a corpus that cannot be used; allowed: globs of UTF-8 text files; mend:\n  {listed}"


def _files_of(pattern: str) -> Iterator[Path]:
    # Path.glob takes no absolute pattern.
    found = glob.iglob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207
    return (path for path in map(Path, found) if path.is_file())


def _read_as_text(path: Path) -> tuple[str, int]:
    hasher, size = hashlib.sha256(), 0
    with path.open(encoding="utf-8", newline="") as file:
        while text := file.read(_READ_BYTES):
            if "\0" in text:
                raise _NotTextError("it holds NUL bytes")
            data = text.encode()
            hasher.update(data)
            size += len(data)
    return hasher.hexdigest(), size


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _passages_of(path: Path) -> Iterator[Passage]:
    """Whole lines, as many as fit; a line longer than a passage is cut where it must be."""
    text = ""
    with path.open(encoding="utf-8", newline="") as file:
        while line := file.readline(PASSAGE_CHARACTERS):
            if len(text) + len(line) > PASSAGE_CHARACTERS:
                yield Passage(text, ends_file=False)
                text = ""
            text += line
    if text:
        yield Passage(text, ends_file=True)
