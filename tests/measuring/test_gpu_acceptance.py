"""The acceptance script, on the CPU with small shapes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_acceptance
from benchmarks.machine import Machine

CPU = torch.device("cpu")


def test_each_policy_gives_the_unplanned_numbers() -> None:
    checks = list(islice(gpu_acceptance.check_numbers(CPU), len(gpu_acceptance.OURS)))
    assert {check.policy for check in checks} == {Path(policy).stem for policy in gpu_acceptance.OURS}
    assert all(check.agreement.is_bitwise for check in checks)


def test_a_stack_of_each_family_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_acceptance, "OURS", ("attention-swap",))
    monkeypatch.setattr(gpu_acceptance, "YARDSTICKS", ("torch-full",))
    stacks = [
        gpu_acceptance.measure_stack(preset, CPU, small=True, rounds=1) for preset in ("qwen3-8b", "qwen3-30b-a3b")
    ]
    for result, _ in stacks:
        assert not result.disagreeing
        assert result["attention-swap"].swap is not None and result["attention-swap"].swap.num_begun > 0
    text = gpu_acceptance._text(Machine.here_and_now(), "cpu", [], stacks, None)
    assert "2 layers of qwen3-8b" in text and "attention-swap" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_have_a_rate() -> None:
    rate = gpu_acceptance.measure_copies(torch.device("cuda"), 2**28)
    assert min(rate.out, rate.back, rate.both) > 0
