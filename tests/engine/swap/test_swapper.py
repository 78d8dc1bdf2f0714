"""What the swapper decides: what may leave, what comes back ahead of use, and what it says it did."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import FunctionBlock, Stack, assert_same_steps, block_names, features, stack_steps
from seeded import PASSED, Schedule, SeededEngine, seeded_swapper, seeded_tier
from swapped_runs import EVERYTHING, RECOMPUTE, SWAP, SwapChecks, one_storage_many_readers, seeded_plan, small_stack
from torch import Tensor

from actmem.planning import Plan, Rule
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.staged import StagedReload
from actmem.runtime.swap.storage import SwapOrder

REGIONS = ["blocks.0", "blocks.1"]
ORDER = SwapOrder("op", None)
KINDS = ("disk", "host", "staged")


class Probe(torch.autograd.Function):
    """Tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, tell: Any) -> Tensor:
        ctx.tell = tell
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.tell()
        return gradient, None


class Probed(Stack):
    """A stack that tells, of each region, when the backward pass is about to enter the one before it."""

    tell: Any = None

    def forward(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            hidden = block(Probe.apply(hidden, lambda index=index: self.tell(index)))
        return hidden


def left(run: SwapChecks) -> None:
    """Let everything that is leaving be away."""
    run.schedule.run_all()
    for _ in range(2):
        run.swapper.begin_call("nothing")


@pytest.mark.filterwarnings("ignore::actmem.runtime.NoEffectWarning")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("swapped", [(0, 1, 2, 3), (0, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("others", ["saved", "recomputed"])
def test_reloads_run_ahead_by_regions(others: str, swapped: tuple[int, ...], prefetch: int, tmp_path: Path) -> None:
    """When a region is done, those that prefetch promises are on their way, whatever becomes of the others."""
    model = Probed(*[FunctionBlock(one_storage_many_readers, seed=seed) for seed in range(4)])
    rules = [Rule(".*", SWAP, layers=swapped)]
    if others == "recomputed":
        rules.insert(0, Rule(".*", RECOMPUTE))
    plan = Plan("some", tuple(rules))
    with seeded_plan(
        model, plan, tmp_path, kinds=("disk",), laziness=1.0, regions=block_names(model), prefetch=prefetch
    ) as run:
        coming: dict[int, list[int]] = {}

        def tell(index: int) -> None:
            calls = sorted(run.swapper._calls.values(), key=lambda each: each.number)
            coming[index] = [
                int(call.region.removeprefix("blocks."))
                for call in calls
                for storage in [reference() for reference in call.storages]
                if storage is not None and storage.reload is not None
            ]

        run.model.tell = lambda index: None
        run.model(features(4, 8).requires_grad_()).sum().backward()
        run.model.tell = tell
        loss = run.model(features(4, 8).requires_grad_()).sum()
        left(run)
        loss.backward()
    for index in range(4):
        ahead = [each for each in range(4) if each < index][::-1][:prefetch]
        assert set(coming[index]) == {each for each in ahead if each in swapped}, (index, coming)


@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_reloads_stay_within_the_limit(kind: str, tmp_path: Path) -> None:
    model = Probed(*[FunctionBlock(one_storage_many_readers, seed=seed) for seed in range(4)])
    with seeded_plan(
        model, EVERYTHING, tmp_path, kinds=(kind,), laziness=0.0, regions=block_names(model), prefetch=3,
        in_flight_limit=300,
    ) as run:  # fmt: skip
        most = 0

        def tell(index: int) -> None:
            nonlocal most
            calls = list(run.swapper._calls.values())
            storages = [storage for call in calls for each in call.storages if (storage := each()) is not None]
            most = max(most, sum(each.num_bytes for each in storages if each.reload is not None))

        run.model.tell = tell
        for _ in range(3):
            loss = run.model(features(4, 8).requires_grad_()).sum()
            left(run)
            loss.backward()
        assert 0 < most <= 300


@pytest.mark.xfail(strict=True, reason="what was reloaded ahead of a pass that stops short stays until the graph goes")
def test_what_a_pass_that_stops_short_had_reloaded_leaves_again(tmp_path: Path) -> None:
    model = small_stack("one_storage_many_readers")
    with seeded_plan(model, EVERYTHING, tmp_path, laziness=0.0, regions=REGIONS, prefetch=1) as run:
        for _ in range(2):
            loss = run.model(features(4, 8).requires_grad_()).sum()
            left(run)
            torch.autograd.grad(loss, run.model.blocks[1].linear.weight, retain_graph=True)
            left(run)
            storages = [each() for call in run.swapper._calls.values() for each in call.storages]
            assert storages and all(each.data is None and each.reload is None for each in storages if each is not None)


def test_a_storage_that_has_to_stay_is_counted_once(tmp_path: Path) -> None:
    """However many of its views are saved, and whether the region's ops are learned or known."""
    model = small_stack("one_storage_many_readers")
    with seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS, in_flight_limit=0) as run:
        counts = []
        for _ in range(3):
            before = run.applied.stats.swap
            run.model(features(4, 8).requires_grad_()).sum().backward()
            counts.append(run.applied.stats.swap.since(before))
        regions = run.applied.stats.regions
    for each in counts:
        assert each.bytes_refused == sum(region.swapped_bytes for region in regions)
        assert each.num_out == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_out_are_what_the_plan_swaps(kind: str, tmp_path: Path) -> None:
    model = small_stack("one_storage_many_readers")
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), laziness=0.0, regions=REGIONS) as run:
        for _ in range(3):
            before = run.applied.stats.swap
            loss = run.model(features(4, 8).requires_grad_()).sum()
            left(run)
            loss.backward()
            counts = run.applied.stats.swap.since(before)
            swapped = run.applied.stats.swapped_bytes
            assert counts.bytes_out == counts.bytes_in == swapped > 0
            assert counts.num_out == counts.num_in and counts.num_withdrawn == counts.num_failed == 0


def test_one_slow_tier_does_not_hold_up_another(tmp_path: Path) -> None:
    schedule = Schedule(0, laziness=1.0)
    swapper = seeded_swapper(("host", "disk"), schedule, tmp_path)
    call = swapper.begin_call("here")
    first, second = torch.ones(100), torch.ones(100)
    slow = swapper.swap(first, SwapOrder("op", "disk"), call, verify=False)
    quick = swapper.swap(second, SwapOrder("op", "host"), call, verify=False)
    assert slow is not None and quick is not None
    swapper.begin_call("there")
    swapper.begin_call("everywhere")
    assert quick.storage.has_copy and quick.storage.data is None
    assert not slow.storage.has_copy and slow.storage.data is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_is_edited_after_it_came_back_is_read_again(kind: str, tmp_path: Path) -> None:
    """Its first memory may still be the one it is looked for in, if the backward pass came while it was leaving."""
    schedule = Schedule(0, laziness=1.0)
    swapper = seeded_swapper((kind,), schedule, tmp_path)
    call = swapper.begin_call("here")
    tensor = torch.arange(100.0)
    view = swapper.swap(tensor, ORDER, call, verify=True)
    assert view is not None
    view.storage.uses = 3
    if kind == "disk":
        first: Any = swapper._tiers["disk"]
        first.writer.pending[0].set_running_or_notify_cancel = lambda: True
        first.writer.pending[0].cancel = lambda: False  # it has begun
    assert torch.equal(swapper.take(view), torch.arange(100.0))
    schedule.run_all()
    swapper.begin_call("there")
    swapper.keep_contents(view.storage)
    tensor.zero_()
    assert torch.equal(swapper.take(view), torch.arange(100.0))
    swapper.keep_contents(view.storage)
    assert torch.equal(swapper.take(view), torch.arange(100.0))


def test_a_reload_nobody_wants_does_not_block_and_outlives_its_copy(tmp_path: Path) -> None:
    """Dropped before its turn, on the way, and after it: no finalizer waits, and no copy finds its target gone."""
    schedule = Schedule(0, laziness=1.0)
    tier: Any = seeded_tier("staged", schedule, tmp_path, SwapCounters())
    for moment in ("queued", "running", "done", "finished"):
        data = torch.arange(64, dtype=torch.uint8)
        copy = tier.offload(data)
        schedule.run_all()
        assert copy.has_left(0)
        sent: Future[Any] = Future()
        target = torch.empty(64, dtype=torch.uint8)
        if moment != "queued":
            sent.set_running_or_notify_cancel()
        reload = StagedReload(tier.engine, sent, target)
        engine = tier.engine
        if moment in ("done", "finished"):
            sent.set_result(engine.reload([(target, data)], []))
        if moment == "finished":
            assert torch.equal(reload.finish(), data)
        del reload
        assert sent.cancelled() == (moment == "queued")
        mark = engine.reload([(target, data)], []) if moment == "running" else PASSED
        del target
        if moment == "running":
            sent.set_result(mark)
        schedule.run_all()
        del sent, mark
    assert schedule.faults == []


def test_a_failed_read_is_no_error_until_somebody_wants_the_bytes(tmp_path: Path) -> None:
    sent: Future[Any] = Future()
    sent.set_exception(OSError("gone"))
    reload = StagedReload(SeededEngine(Schedule(0)), sent, torch.empty(1))
    assert reload.is_there()
    with pytest.raises(OSError, match="gone"):
        reload.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_may_take_at_once(kind: str, tmp_path: Path) -> None:
    swapper = seeded_swapper((kind,), Schedule(0, laziness=0.3), tmp_path)
    call = swapper.begin_call("here")
    tensors = [torch.full((50,), float(number)) for number in range(40)]
    views = [swapper.swap(each, ORDER, call, verify=True) for each in tensors]
    for _ in range(3):
        swapper.begin_call("there")
    faults: list[int] = []

    def take(start: int) -> None:
        for number in range(start, 40, 2):
            view = views[number]
            assert view is not None
            if not bool(swapper.take(view).eq(number).all()):
                faults.append(number)

    threads = [threading.Thread(target=take, args=(start,)) for start in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=20)
        assert not each.is_alive()
    assert faults == []


def test_plans_side_by_side_have_files_of_their_own(tmp_path: Path) -> None:
    model = small_stack("views")
    with (
        seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS) as first,
        seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS) as second,
    ):
        assert_same_steps(stack_steps(first.model), stack_steps(second.model))
        assert first.swapper is not second.swapper


def test_the_hidden_share_is_what_nobody_waited_for() -> None:
    assert SwapCounters().hidden_share is None, "nothing was copied"
    assert SwapCounters(exposed_seconds=0.5, copy_out_seconds=2.0).hidden_share == 0.75
    assert SwapCounters(exposed_seconds=3.0, copy_out_seconds=1.0, copy_in_seconds=1.0).hidden_share == 0.0
