from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actmem.errors import CheckpointError, DataError
from actmem.training.packing import PackedSequences


def packed(num_tokens: int = 101, length: int = 10, seed: int = 3, identity: str = "x") -> PackedSequences:
    return PackedSequences(np.arange(num_tokens, dtype="<u4"), length, seed=seed, identity=identity)


def test_an_epoch_predicts_each_token_once() -> None:
    sequences = packed()
    batch = sequences.next_batch(sequences.num_sequences)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert sorted(batch.inputs.flatten().tolist()) == list(range(100))
    assert sorted(batch.targets.flatten().tolist()) == list(range(1, 101))
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])


def test_order_is_shuffled_anew_each_epoch_and_follows_the_seed() -> None:
    first, again, other = packed(), packed(), packed(seed=4)
    orders = [source.next_batch(10).inputs[:, 0].tolist() for source in (first, again, other, first)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
    assert sorted(orders[0]) == sorted(orders[3])


def test_a_batch_goes_on_into_the_next_epoch() -> None:
    whole, split = packed(), packed()
    expected = torch.cat([split.next_batch(10).inputs, split.next_batch(10).inputs])
    assert torch.equal(torch.cat([whole.next_batch(7).inputs, whole.next_batch(13).inputs]), expected)


@given(before=st.lists(st.integers(1, 12), max_size=5), after=st.integers(1, 12))
def test_resuming_gives_exactly_the_batches_that_would_have_come(before: list[int], after: int) -> None:
    straight, resumed = packed(), packed()
    for size in before:
        straight.next_batch(size)
    resumed.resume(json.loads(json.dumps(straight.position())))
    for _ in range(3):
        assert torch.equal(straight.next_batch(after).inputs, resumed.next_batch(after).inputs)


@pytest.mark.parametrize("other", [{"length": 5}, {"seed": 4}, {"identity": "y"}])
def test_a_position_in_other_data_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="other data"):
        packed().resume(packed(**other).position())  # type: ignore[arg-type]


def test_one_sequence_is_enough_and_one_token_less_is_not() -> None:
    assert packed(num_tokens=11).next_batch(3).inputs.shape == (3, 10)
    with pytest.raises(DataError, match="has 10 tokens to train on, and one sequence needs 11"):
        packed(num_tokens=10)


def test_held_out_batches_are_the_same_every_time_and_end_with_the_stream() -> None:
    sequences = packed()
    sequences.next_batch(4)
    batches = sequences.held_out_batches(batch_size=4, num_batches=8)
    assert [len(batch.inputs) for batch in batches] == [4, 4, 2]
    assert torch.cat([batch.inputs for batch in batches]).flatten().tolist() == list(range(100))
    assert [len(batch.inputs) for batch in sequences.held_out_batches(4, 2)] == [4, 4]
