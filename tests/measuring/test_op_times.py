"""Ops of a step timed in place: the bookkeeping to the last digit, and the signatures that graphs have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from actmem.measuring.bench import random_batch
from actmem.measuring.op_times import OpClocks, measure_op_times, scaled
from actmem.tracing import trace
from actmem.training.loss import next_token_loss

SECONDS = st.floats(1e-7, 1e-1)
STEPS = st.lists(st.dictionaries(st.sampled_from("abcd"), st.lists(SECONDS, min_size=1), min_size=1), min_size=1)


def test_times_by_hand() -> None:
    steps = [{"mm": [1.0, 3.0], "add": [0.5]}, {"mm": [2.0, 2.0], "add": [0.5]}]
    times = scaled(steps, 9.0)
    assert times.factor == 2.0
    assert times.seconds == {"mm": 4.0, "add": 1.0}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(1.0, None), (2.0, None), (0.4, "2.5 times as long as in a step"), (3.0, "3.0 times as long as its ops")],
)
def test_times_that_were_scaled_far_are_doubtful(seconds: float, told: str | None) -> None:
    doubt = scaled([{"mm": [1.0]}], seconds).doubt
    assert doubt is None if told is None else doubt is not None and told in doubt


@settings(max_examples=50)
@given(STEPS, st.floats(1e-3, 1e3))
def test_the_ops_of_a_step_add_up_to_it(steps: list[dict[str, list[float]]], step_seconds: float) -> None:
    times = scaled(steps, step_seconds)
    occurrences = {name: sum(len(step.get(name, ())) for step in steps) / len(steps) for name in times.seconds}
    assert sum(times.seconds[name] * occurrences[name] for name in times.seconds) == pytest.approx(step_seconds)


def step_of(model: PreTrainedModel, batch: object) -> Callable[[], None]:
    def step() -> None:
        next_token_loss(model, batch, num_targets=batch.targets.numel(), kind="standard").total().backward()

    return step


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_every_op_of_a_traced_layer_has_a_time(family: str, make_model: Callable[[str], PreTrainedModel]) -> None:
    model = make_model(family)
    batch = random_batch(model, 2, 16)
    graph = trace(model.base_model, {"input_ids": batch.inputs, "use_cache": False})
    times = measure_op_times(step_of(model, batch), model.device)
    (region,) = graph.kinds.values()
    # Torch detaches some results when somebody else refers to them, as a tape does that learns and clocks do not.
    traced = {region.signature(index) for index, op in enumerate(region.ops) if op.name != "detach"}
    assert traced <= times.seconds.keys()
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_clocks_see_the_backward_pass_and_count_each_time() -> None:
    clocks = OpClocks(torch.device("cpu"))
    numbers = torch.ones(4, requires_grad=True)
    for _ in range(2):
        with clocks:
            numbers.sin().sin().sum().backward()
    first, second = clocks.steps
    assert len(first["sin(4 float32)"]) == len(second["sin(4 float32)"]) == 2
    assert len(second["cos(4 float32)"]) == 2
    assert "add_(4 float32, 4 float32)" in second and "add_(4 float32, 4 float32)" not in first
