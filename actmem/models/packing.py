"""Hugging Face's search for several sequences packed into one row, which needs numbers to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import masking_utils


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Let models take each row of a batch for one sequence, unseen.

    They look for jumps in the position ids, and where those are fake tensors they assume that there are some: then they
    make and save an attention mask, which a training step on whole sequences never has.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
