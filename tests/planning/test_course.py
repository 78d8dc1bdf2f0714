"""Courses and steps on graphs made by hand, against answers worked out by hand."""

from __future__ import annotations

import pytest

from actmem.graph import Call, Constant, Escape, Gap, Graph, Op, RegionGraph, Standing, Step, StepOp, Storage, Value
from actmem.planning.course import Costs, follow
from actmem.planning.fates import Fates
from actmem.planning.simulation import Conditions, LayerPlan, Link, Simulation
from actmem.planning.simulator import simulate

COSTS = Costs(lambda region, index: 1.0, lambda op: 1.0 if op.name else 0.0)


def chain() -> RegionGraph:
    """input (100 bytes) -> a (40) -> b (20) -> out (100); autograd saves the first three, picks them up in reverse."""
    storages = (Storage(100, "input"), Storage(40, "op"), Storage(20, "op"), Storage(100, "op"))
    values = tuple(Value(index, (1,), "float32", None if index == 0 else index - 1) for index in range(4))
    ops = tuple(Op(name, name, (index,), (index + 1,), False, False, 0, 0) for index, name in enumerate("abc"))
    backward = tuple(
        StepOp(name, name, 0, 0, False, size, freed, gradient, gradient, (position,), (position,))
        for name, size, freed, gradient, position in (
            ("c'", 20, 100, 0, 2),
            ("b'", 40, 20, 0, 1),
            ("a'", 110, 40, 10, 0),
        )
    )
    return RegionGraph(ops, values, storages, (0, 1, 2), "layer", backward)


def fates_of(region: RegionGraph, held: set[int], *, swapped: frozenset[int] = frozenset()) -> Fates:
    """Whatever is neither held nor swapped of a and b is made again."""
    remade = {1, 2} - held - swapped
    return Fates(
        region, frozenset(index - 1 for index in remade), dict.fromkeys(held, "saved"), frozenset(remade), swapped
    )


def standing_bytes(held: set[int], **options: bool) -> list[tuple[str, int]]:
    course = follow(fates_of(chain(), held), COSTS, **options)
    return [(each.name, each.standing_bytes) for each in course.backward]


def test_bytes_of_a_forward_pass() -> None:
    course = follow(fates_of(chain(), {0}), COSTS)
    assert [each.standing_bytes for each in course.forward] == [140, 160, 220]
    assert course.held_bytes == 100


def test_bytes_of_a_backward_pass_that_has_all_it_needs() -> None:
    assert standing_bytes({0, 1, 2}) == [("c'", 180), ("b'", 100), ("a'", 150)]


def test_bytes_of_a_backward_pass_that_makes_everything_again() -> None:
    again = [("a", 140), ("b", 160), ("c'", 180), ("b'", 100), ("a'", 150)]
    assert standing_bytes({0}) == again


def test_a_value_saved_in_the_middle_cuts_the_replay() -> None:
    assert standing_bytes({0, 1}) == [("b", 160), ("c'", 180), ("b'", 100), ("a'", 150)]


@pytest.mark.parametrize(("stand", "left"), [(True, 0), (False, 10)])
def test_fresh_gradients_are_left(stand: bool, left: int) -> None:
    fates = fates_of(chain(), {0})
    assert follow(fates, COSTS, gradients_stand=stand).left_bytes == left


def test_allocations_are_rounded_up() -> None:
    costs = Costs(COSTS.op_seconds, COSTS.step_op_seconds, granularity=64)
    assert follow(fates_of(chain(), {0, 2}), costs).held_bytes == 128 + 64


def step_of(num_layers: int, *, constants: tuple[Constant, ...] = (), calls: tuple[Call, ...] | None = None) -> Graph:
    """Layers of the chain; the gap in front makes the input, that behind turns the output into its gradient."""
    made = StepOp("embed", "embed", 0, 0, False, 0, 0)
    gaps = (
        Gap((made,)),
        *[Gap() for _ in range(num_layers - 1)],
        Gap((), (StepOp("loss", "loss", 0, 0, False, 100, 0),)),
    )
    layers = {f"layers.{index}": "Layer" for index in range(num_layers)}
    step = Step(calls or (Call(),) * num_layers, gaps, Standing(1000, 0, 50, 100), 1, constants)
    return Graph(layers, {"Layer": chain()}, step)


def swapping(num_layers: int, rate: float, **conditions: float) -> Simulation:
    region = chain()
    plan = LayerPlan(fates_of(region, {0, 2}, swapped=frozenset({1})), {1: "disk"})
    links = {"disk": Link(rate, rate)}
    return simulate(step_of(num_layers), [plan] * num_layers, Conditions(COSTS, links, **conditions))  # type: ignore[arg-type]


def test_seconds_without_copies() -> None:
    region = chain()
    simulation = simulate(step_of(2), [LayerPlan(fates_of(region, {0}))] * 2, Conditions(COSTS, {}))
    assert simulation.seconds == 1 + 2 * 3 + 1 + 2 * (3 + 2)
    assert simulation.replay_seconds == 4


def test_the_wait_for_a_reload_is_exact() -> None:
    # Left at 2 + 0.4 = 2.4 s. Back from the start of the backward pass at 5 s; needed by its second op at 6 s.
    assert swapping(1, 100.0).exposed_seconds == 0
    # 40 bytes at 16 a second: out from 2 to 4.5 s, back from 5 to 7.5 s, of which 1.5 s are waited.
    assert swapping(1, 16.0).exposed_seconds == pytest.approx(1.5)


def test_what_has_not_left_stays() -> None:
    assert swapping(1, 1.0).exposed_seconds == 0


def test_reloads_ahead_hide_the_wait() -> None:
    assert [swapping(3, 16.0, prefetch=ahead).exposed_seconds for ahead in (1, 2)] == [pytest.approx(1.5)] * 2
    assert swapping(3, 16.0, prefetch=0).exposed_seconds == pytest.approx(4.5)


def test_what_does_not_fit_in_flight_is_saved() -> None:
    assert swapping(1, 16.0, in_flight_limit=39).exposed_seconds == 0


def peak_around(constants: tuple[Constant, ...] = (), calls: tuple[Call, ...] | None = None, *, held: set[int]) -> int:
    graph = step_of(2, constants=constants, calls=calls)
    return simulate(graph, [LayerPlan(fates_of(chain(), held))] * 2, Conditions(COSTS, {})).peak_bytes


def test_what_escapes_stands_until_it_is_let_go_and_counts_once() -> None:
    escape = Call(escapes=(Escape(1, 0, True, 0),))
    without, with_escape = (peak_around(calls=(call, Call()), held={0}) for call in (Call(), escape))
    assert with_escape - without == 40
    assert peak_around(calls=(escape, Call()), held={0, 1}) == peak_around(held={0, 1})
