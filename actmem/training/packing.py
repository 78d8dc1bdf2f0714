"""Sequences of equal length out of a stream of tokens, in an order that a seed decides and that can be resumed.

Sequence i holds tokens [i * length, (i + 1) * length], ends included: the inputs are all but the last and the targets
all but the first, so that each token of the stream but the first is predicted once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from actmem.errors import CheckpointError, DataError
from actmem.training.token_stream import Tokens


@dataclass(frozen=True)
class Batch:
    """Token ids `inputs` and, shifted by one, `targets`: both int64 of shape (sequences, sequence_length)."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device))


class PackedSequences:
    """Endless batches over the epochs of `tokens`. The place in them is `position()`, and `resume()` goes back to it.

    Each epoch goes through all sequences once, in an order of its own that depends on `seed` and the epoch alone.
    `identity` names the tokens. Raises `DataError` for a stream shorter than one sequence.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, *, seed: int, identity: str) -> None:
        self.sequence_length = sequence_length
        self.num_sequences = (len(tokens) - 1) // sequence_length
        if self.num_sequences < 1:
            raise DataError(
                f"the corpus has {len(tokens)} tokens to train on, and one sequence needs {sequence_length + 1}; "
                "add text to data.path or lower data.sequence_length"
            )
        self._tokens = tokens
        self._seed = seed
        self._identity = f"{identity}/{sequence_length}/{seed}"
        self._epoch, self._index = 0, 0
        self._order = self._shuffled(0)

    def next_batch(self, num_sequences: int) -> Batch:
        """The next `num_sequences` sequences, going on into the next epoch where this one ends."""
        return self._gather([self._next() for _ in range(num_sequences)])

    def position(self) -> dict[str, int | str]:
        """Where the next batch starts, for `resume`."""
        return {"epoch": self._epoch, "index": self._index, "stream": self._identity}

    def resume(self, position: dict[str, int | str]) -> None:
        """Go on from a `position()`. Raises `CheckpointError` for that of other data, where it would mean nothing."""
        if position["stream"] != self._identity:
            raise CheckpointError(
                "the checkpoint was written with other data: its text, tokenizer, data.eval_share, "
                f"data.sequence_length or train.seed differ ({position['stream']}, now {self._identity}); "
                "set them back, or start a new run in another train.output_dir"
            )
        self._epoch, self._index = int(position["epoch"]), int(position["index"])
        self._order = self._shuffled(self._epoch)

    def held_out_batches(self, batch_size: int, num_batches: int) -> list[Batch]:
        """The same first batches of the stream, unshuffled, on every call; fewer where the stream is short."""
        count = min(batch_size * num_batches, self.num_sequences)
        return [self._gather(range(count)[start : start + batch_size]) for start in range(0, count, batch_size)]

    def _next(self) -> int:
        if self._index == self.num_sequences:
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        self._index += 1
        return int(self._order[self._index - 1])

    def _shuffled(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_sequences)

    def _gather(self, sequences: list[int] | range) -> Batch:
        starts = [sequence * self.sequence_length for sequence in sequences]
        windows = np.stack([self._tokens[start : start + self.sequence_length + 1] for start in starts])
        ids = torch.from_numpy(windows.astype(np.int64))
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
