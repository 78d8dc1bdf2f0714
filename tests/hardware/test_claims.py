"""Published figures that no device of that kind can reach."""

from __future__ import annotations

from typing import Any

import pytest

from actmem.config.presets import PRESETS
from actmem.hardware import (
    dense_step_flops,
    flops_claim_problem,
    implied_flops_per_second,
    link_claim_problem,
    load_hardware,
)

QWEN3_8B: Any = PRESETS["qwen3-8b"]
SEED_MS = {"no recompute": 612, "whole layers": 801, "MLP": 708, "selective": 685, "selective with Liger": 555}


def test_the_seeds_baseline_needs_a_third_more_than_the_card_has() -> None:
    flops = dense_step_flops(QWEN3_8B, 4, 4096)
    assert round(implied_flops_per_second(flops, 0.612) / 1e12) == 1329
    problem = flops_claim_problem(flops, 0.612, load_hardware("h100-sxm"))
    assert problem == "implies 1,329 TFLOP/s on a 989 TFLOP/s card"


@pytest.mark.parametrize("row", SEED_MS)
def test_no_row_of_the_seeds_table_is_possible_even_if_recomputing_were_free(row: str) -> None:
    flops = dense_step_flops(QWEN3_8B, 4, 4096)
    assert flops_claim_problem(flops, SEED_MS[row] / 1e3, load_hardware("h100")) is not None


def test_a_step_at_the_nominal_efficiency_is_possible() -> None:
    assert flops_claim_problem(dense_step_flops(QWEN3_8B, 4, 4096), 1.17, load_hardware("h100")) is None


def test_flops_by_hand() -> None:
    one = dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size"), 1
    )
    assert dense_step_flops(one | {"num_hidden_layers": 2}, 3, 4) == 6 * (2 * 7 + 1) * 12 + 2 * 3 * 32 * 7 // 2


def test_links() -> None:
    h100 = load_hardware("h100")
    assert link_claim_problem(55e9, 1.0, h100, "out") is None
    assert link_claim_problem(100e9, 1.0, h100, "in") == "implies 100 GB/s on a 64 GB/s link"
    assert link_claim_problem(1.0, 1.0, load_hardware("cpu"), "in") == "cpu has no link"


@pytest.mark.parametrize(("flops", "seconds"), [(1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_nothing_follows_from_no_time_or_no_work(flops: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="imply no rate"):
        implied_flops_per_second(flops, seconds)
