"""Each layout trains as one process does on all the data; and a plan changes neither a bit of it nor a collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from laid_out import CASES, LATE, PLANNED_LAST, PLANS, Outcome, run_alone, work
from planned_runs import assert_same_steps
from process_groups import run_ranks
from torch import Tensor

NAMES = [(num_ranks, name) for num_ranks, cases in CASES.items() for name in cases]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one group of processes per number of ranks."""
    path = tmp_path_factory.mktemp("layouts")
    for num_ranks in CASES:
        run_ranks(work, num_ranks, num_ranks, path)
    return path


@pytest.fixture(scope="module")
def results(directory: Path) -> Callable[[int, int, Any], Any]:
    """What came of a case, by number of ranks, rank and key."""

    @cache
    def load(num_ranks: int, rank: int) -> dict[Any, Any]:
        found: dict[Any, Any] = torch.load(directory / f"{num_ranks}-{rank}", weights_only=False)
        return found

    def read(num_ranks: int, rank: int, key: Any) -> Any:
        result = load(num_ranks, rank)[key]
        if isinstance(result, str):
            pytest.fail(f"rank {rank} of {num_ranks}, {key}: {result}")
        return result

    return read


def assert_close(mine: Tensor, theirs: Tensor, what: str) -> None:
    assert mine.shape == theirs.shape, what
    largest = float(theirs.abs().max())
    difference = float((mine - theirs).abs().max())
    assert difference <= 2e-5 * max(largest, 1e-3), f"{what} differs by {difference} at a largest of {largest}"


def assert_close_to(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert_close(mine[name], expected, f"{what} {name}")


@pytest.mark.parametrize(("num_ranks", "name"), NAMES)
def test_a_layout_trains_as_one_process_does(
    results: Callable[[int, int, Any], Any], num_ranks: int, name: str
) -> None:
    alone = run_alone(CASES[num_ranks][name])
    for rank in range(num_ranks):
        outcome: Outcome = results(num_ranks, rank, (name, "none"))
        for step, (mine, theirs) in enumerate(zip(outcome.whole, alone.whole, strict=True)):
            assert_close(mine.loss, theirs.loss, f"loss of step {step}")
            assert_close_to(mine.gradients, theirs.gradients, f"step {step}, gradient of")


@pytest.mark.parametrize(("num_ranks", "name"), NAMES)
def test_each_gradient_counts_once_in_the_norm(
    results: Callable[[int, int, Any], Any], num_ranks: int, name: str
) -> None:
    alone = run_alone(CASES[num_ranks][name])
    outcomes = [results(num_ranks, rank, (name, "none")) for rank in range(num_ranks)]
    assert len({outcome.norm for outcome in outcomes}) == 1
    assert outcomes[0].norm == pytest.approx(alone.norm, rel=1e-5)
    assert_close_to(outcomes[0].clipped, alone.clipped, "clipped gradient of")


@pytest.mark.parametrize(
    ("num_ranks", "name", "plan"),
    [(*each, plan) for each in NAMES for plan in PLANS] + [(*each, LATE) for each in NAMES if each[1] in PLANNED_LAST],
)
def test_invariant_01_a_plan_changes_no_bit_and_no_collective(
    results: Callable[[int, int, Any], Any], num_ranks: int, name: str, plan: str
) -> None:
    for rank in range(num_ranks):
        expected: Outcome = results(num_ranks, rank, (name, "none"))
        planned: Outcome = results(num_ranks, rank, (name, plan))
        assert_same_steps(planned.steps, expected.steps, f"rank {rank}")
        assert expected.collectives[0], "nothing was communicated"
        assert planned.collectives == expected.collectives
        assert (planned.dropped_bytes > 0) == (plan != "attention-swap")
        assert (planned.num_swapped > 0) == (plan in ("attention-swap", "mixed"))


@pytest.mark.parametrize("name", [name for name, case in CASES[2].items() if case.idle])
def test_some_experts_had_no_token_where_a_case_says_so(results: Callable[[int, int, Any], Any], name: str) -> None:
    outcome: Outcome = results(2, 0, (name, "none"))
    gradient = outcome.whole[0].gradients["model.layers.0.mlp.experts.down_proj"]
    busy = [bool(each.any()) for each in gradient]
    assert sorted([any(busy[:2]), any(busy[2:])]) == [False, True], "one rank of two was to have no token"


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("tensors after a plan", "is under a plan already; the order is shard_tensors"),
        ("tensors after data", "is sharded over data parallel ranks already"),
        ("tensors twice", "is spread over ranks already"),
        ("data twice", "is laid out over data parallel ranks already"),
        ("copies twice", "is laid out over data parallel ranks already"),
        ("experts of a dense model", "has no experts"),
        ("uneven heads", "num_key_value_heads 1 cannot be cut evenly"),
        ("uneven experts", "5 experts cannot be spread evenly"),
        ("another model", "LlamaDecoderLayer"),
        ("too few ranks", "ranks, and"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(results: Callable[[int, int, Any], Any], what: str, part: str) -> None:
    assert part in results(2, 0, "refusals")[what]
