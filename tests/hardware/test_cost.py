"""Times of ops and copies, against figures worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.errors import HardwareError
from actmem.graph import Op, RegionGraph, StepOp, Storage, Value
from actmem.hardware import CopyRates, CostModel, Hardware, Level, load_hardware, work_of
from actmem.hardware.cost import wire_bytes


def work(name: str = "mm", *, flops: int = 0, moved: int = 0, ranks: int = 0, dtype: str = "bfloat16") -> StepOp:
    intensive = flops > 0
    return StepOp(name, f"{name}(8x8 {dtype})", flops, moved, intensive, 0, 0, group_size=ranks)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (work("view"), 0.0),
        (work("mm", flops=10**12, moved=10**6), 10**12 / 50e12),
        (work("mm", flops=10**12, moved=10**6, dtype="float32"), 10**12 / 25e12),
        (work("mm", flops=10**9, moved=10**11), 10**11 / 0.8e12),
        (work("mul", moved=8 * 10**9), 0.01),
        (work("mul", moved=8), 1e-6),
        (work("scaled_dot_product_attention", flops=10**12), 0.5 * 10**12 / 25e12),
        (work("_flash_attention_backward", flops=10**12), 0.5 * 10**12 / 25e12),
        (work("_efficient_attention_backward", flops=10**12), 0.5 * 10**12 / 25e12),
        (work("all_reduce", moved=2 * 10**9, ranks=1), 2 * 10**9 / 0.8e12),
        (work("all_reduce", moved=2 * 10**9, ranks=4), 1.5 * 10**9 / 80e9),
        (work("all_gather_into_tensor", moved=5 * 10**9, ranks=4), 3 * 10**9 / 80e9),
        (work("reduce_scatter_tensor", moved=9 * 10**9, ranks=8), 7 * 10**9 / 8e9),
        (work("all_to_all_single", moved=2 * 10**9, ranks=4), 0.75 * 10**9 / 80e9),
        (work("broadcast", moved=2 * 10**9, ranks=4), 10**9 / 80e9),
    ],
    ids=lambda each: f"{each.name}-{each.group_size}" if isinstance(each, StepOp) else "",
)
def test_seconds_by_hand(hardware: Hardware, op: StepOp, seconds: float) -> None:
    assert CostModel(hardware).seconds(op) == pytest.approx(seconds)


def test_a_lower_bound_takes_the_peaks_and_nothing_else(hardware: Hardware) -> None:
    product = work(flops=10**12)
    model = CostModel(hardware.model_copy(update={"measured_ops": {product.signature: 5.0}}))
    assert model.lower_bound_seconds(product) == pytest.approx(0.01)
    assert model.lower_bound_seconds(work("mul", moved=8)) == pytest.approx(8e-12)
    assert model.lower_bound_seconds(work("view")) == 0.0


def test_what_was_measured_goes_before_the_model_even_for_views(hardware: Hardware) -> None:
    product, view = work(flops=10**12), work("view")
    measured = hardware.model_copy(update={"measured_ops": {product.signature: 5.0, view.signature: 2e-6}})
    model = CostModel(measured)
    assert (model.seconds(product), model.seconds(view)) == (5.0, 2e-6)
    assert model.is_measured(product) and not model.is_measured(work("mul", moved=8))
    assert model.seconds(work("mul", moved=8 * 10**9)) == pytest.approx(0.01)


def test_a_slow_vector_unit_bounds_pointwise_ops_alone(hardware: Hardware) -> None:
    slow = CostModel(hardware.model_copy(update={"vector_flops_per_second": hardware.matmul_flops_per_second}))
    assert slow.seconds(work("mul", moved=8 * 10**9)) == pytest.approx(0.01)
    weak = hardware.memory_bytes_per_second.model_copy(update={"peak": 1e11})
    slow = CostModel(hardware.model_copy(update={"vector_flops_per_second": weak}))
    assert slow.seconds(work("mul", moved=8 * 10**9)) == pytest.approx(4 * 10**9 / 0.8e11)
    assert slow.seconds(work("mm", moved=8 * 10**9, flops=1)) == pytest.approx(0.01)


def test_ops_of_a_region_cost_what_their_graph_says(hardware: Hardware) -> None:
    values = tuple(Value(index, (8, 8), "bfloat16", None) for index in range(2))
    op = Op("mlp.mm", "mm", (0, 1), (), False, True, 10**12, 10**6)
    graph = RegionGraph((op,), values, (Storage(128, "input"), Storage(128, "input")), ())
    assert work_of(graph, 0).signature == "mm(8x8 bfloat16, 8x8 bfloat16)"
    assert CostModel(hardware).op_seconds(graph, 0) == pytest.approx(0.02)


def test_copies_nominally_run_as_fast_as_was_seen(hardware: Hardware) -> None:
    assert CostModel(hardware).link == CopyRates(10e9, 16e9, 0.75)
    assert CostModel(hardware, "low").link == CopyRates(5e9, 8e9, 0.75)
    assert CostModel(hardware, "high").link == CopyRates(11.25e9, 18e9, 0.75)
    assert CostModel(hardware).disk is None


def test_no_copy_is_faster_than_the_peak() -> None:
    assert CostModel(load_hardware("h100"), "high").link == CopyRates(55.6e9 * 0.9 / 0.8, 55.6e9 * 0.9 / 0.8, 0.85)
    tight = load_hardware("cpu").model_copy(update={"disk": load_hardware("h100").link})
    fast = CostModel(tight, "high").disk
    assert fast is not None and fast.out_bytes_per_second <= 64e9


def test_a_device_without_a_network_says_so(hardware: Hardware) -> None:
    alone = CostModel(hardware.model_copy(update={"collectives": None}))
    with pytest.raises(HardwareError, match="all_reduce talks to 4; allowed: scale_up_bytes_per_second"):
        alone.seconds(work("all_reduce", moved=8, ranks=4))


LEVELS: tuple[Level, ...] = ("low", "nominal", "high")
NAMES = st.sampled_from(["mm", "mul", "scaled_dot_product_attention", "all_reduce", "all_gather_into_tensor"])
AMOUNTS = st.integers(0, 10**15)


@given(NAMES, AMOUNTS, AMOUNTS, st.integers(0, 10**12), st.integers(0, 64), st.sampled_from(["h100", "910b2", "cpu"]))
def test_more_work_never_takes_less(name: str, flops: int, moved: int, more: int, ranks: int, device: str) -> None:
    model = CostModel(load_hardware(device))
    op = work(name, flops=flops, moved=moved, ranks=ranks if "all" in name else 0)
    assert model.seconds(replace(op, flops=flops + more)) >= model.seconds(op)
    assert model.seconds(replace(op, moved_bytes=moved + more)) >= model.seconds(op)


@given(NAMES, AMOUNTS, AMOUNTS, st.sampled_from(["h100", "910b3", "cpu"]))
def test_low_is_slowest_and_nothing_beats_the_bound(name: str, flops: int, moved: int, device: str) -> None:
    op = work(name, flops=flops, moved=moved)
    low, nominal, high = (CostModel(load_hardware(device), level).seconds(op) for level in LEVELS)
    assert low >= nominal >= high >= CostModel(load_hardware(device)).lower_bound_seconds(op)


@given(st.sampled_from(["all_gather", "_reduce_scatter_base_", "allreduce_", "alltoall"]), st.integers(2, 1024))
def test_a_ring_never_sends_more_than_twice_what_the_op_moves(name: str, ranks: int) -> None:
    assert 0 < wire_bytes(work(name, moved=10**6, ranks=ranks)) <= 10**6


def test_profiles_and_costs_need_no_torch() -> None:
    code = "import sys, actmem.hardware; actmem.hardware.load_hardware('h100'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
