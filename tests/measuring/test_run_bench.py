"""All policies on a real model: sizes, numbers, floor, and the model as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actmem.config.schema import MemoryConfig
from actmem.errors import MeasurementError, PlanError
from actmem.measuring import BenchResult, bench, run_bench
from actmem.measuring.agreement import Agreement
from actmem.measuring.bench import num_steps, random_batch, with_own_modules
from actmem.runtime.intercept import is_planned
from actmem.runtime.swap.scratch_file import ScratchFile

POLICIES = ("selective", "mlp", "full", "torch-sac", "torch-full")
TOKENS = 64


@pytest.fixture(scope="module", params=["dense", "moe"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def results() -> dict[str, BenchResult]:
    return {}


@pytest.fixture
def result(family: str, results: dict[str, BenchResult], make_model: Callable[[str], PreTrainedModel]) -> BenchResult:
    """One bench a family, for all tests that only look at it."""
    if family not in results:
        model = make_model(family)
        results[family] = run_bench(model, random_batch(model, 2, TOKENS), POLICIES, setting=family, rounds=2)
    return results[family]


def test_all_policies_give_the_same_bits(result: BenchResult) -> None:
    assert [each.policy for each in result.policies] == ["none", *POLICIES]
    assert result.is_repeatable and result.disagreeing == []
    assert all(each.agreement.is_bitwise for each in result.policies)


def test_recomputing_more_peaks_lower(result: BenchResult) -> None:
    peaks = {each.policy: each.peak_bytes for each in result.policies}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert peaks["full"] < peaks["mlp"] < peaks["none"]
    assert result.peak_ratio(result["none"]) == result.step_ratio(result["none"]) == 1.0


def test_bytes_by_reason_add_up(result: BenchResult) -> None:
    for each in result.policies:
        if each.policy.startswith("torch-"):
            assert each.holdings is None
        else:
            assert each.holdings is not None
            assert sum(each.holdings.held_bytes_by_reason.values()) == each.holdings.held_bytes > 0
            assert (each.holdings.num_replayed_ops > 0) == (each.policy != "none")


def test_what_a_policy_drops_is_what_its_peak_loses(result: BenchResult) -> None:
    none, selective = result["none"], result["selective"]
    assert none.holdings is not None and selective.holdings is not None
    saved = none.holdings.held_bytes - selective.holdings.held_bytes
    assert none.peak_bytes - selective.peak_bytes == pytest.approx(saved, rel=0.1)


def test_the_floor_lies_between_the_policies_that_may_and_may_not_rerun_matmuls(result: BenchResult) -> None:
    assert result["full"].peak_bytes < result.floor_bytes <= result["selective"].peak_bytes * 1.001
    assert result.floor_bytes <= result["torch-sac"].peak_bytes


def test_a_result_goes_through_json(result: BenchResult, tmp_path: Path) -> None:
    result.save(tmp_path / "bench.json")
    assert BenchResult.load(tmp_path / "bench.json") == result


def test_disagreement_is_told(result: BenchResult) -> None:
    wrong = replace(result.policies[1], agreement=Agreement(difference=1e-3, allowed=1e-4))
    assert replace(result, policies=(result.policies[0], wrong)).disagreeing == [wrong.policy]


def test_the_model_is_left_as_it_was(make_model: Callable[[str], PreTrainedModel]) -> None:
    model = make_model("dense")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    run_bench(model, random_batch(model, 1, TOKENS), ["full"], rounds=1)
    assert dict(model.named_modules()) == modules
    assert not any(map(is_planned, modules.values()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_every_step_is_announced(make_model: Callable[[str], PreTrainedModel]) -> None:
    model, heard = make_model("dense"), []
    run_bench(model, random_batch(model, 1, TOKENS), ["none", "full"], rounds=1, on_step=heard.append)
    assert len(heard) == num_steps(["none", "full"], 1)
    assert heard.count("none") == heard.count("full")


@pytest.mark.parametrize("loss", ["standard", "chunked"])
def test_autocast_and_chunked_loss(make_model: Callable[[str], PreTrainedModel], loss: str) -> None:
    model = make_model("dense")
    batch = random_batch(model, 1, TOKENS)
    result = run_bench(model, batch, ["selective"], rounds=1, loss=loss, autocast=torch.bfloat16)
    assert result.disagreeing == []


def test_an_unknown_policy_is_refused_before_any_step(make_model: Callable[[str], PreTrainedModel]) -> None:
    model, heard = make_model("dense"), []
    with pytest.raises(PlanError, match="'ful' is neither a policy"):
        run_bench(model, random_batch(model, 1, TOKENS), ["ful"], on_step=heard.append)
    assert heard == []


def test_a_step_that_leaks_names_its_policy(
    make_model: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, leaked = make_model("dense"), []
    honest = bench.next_token_loss

    def leaking(*args: object, **kwargs: object) -> object:
        leaked.append(torch.empty(2**20))
        return honest(*args, **kwargs)

    monkeypatch.setattr(bench, "next_token_loss", leaking)
    with pytest.raises(MeasurementError, match=r"policy none: 4\.00 MiB are left"):
        run_bench(model, random_batch(model, 1, TOKENS), ["full"], rounds=1)


def test_own_modules_share_parameters_and_nothing_else(make_model: Callable[[str], PreTrainedModel]) -> None:
    model = make_model("dense")
    twin = with_own_modules(model)
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    assert not set(model.modules()) & set(twin.modules())


def test_random_tokens_depend_on_the_seed_alone(make_model: Callable[[str], PreTrainedModel]) -> None:
    model = make_model("dense")
    first, again, other = (random_batch(model, 2, 8, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs) and not torch.equal(first.inputs, other.inputs)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    tokens: Tensor = first.inputs
    assert tokens.shape == (2, 8) and int(tokens.max()) < model.config.vocab_size


def test_a_copy_that_is_still_written_when_a_step_is_over_is_none_of_what_it_leaves(
    make_model: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ScratchFile.write

    def slowly(*arguments: Any) -> None:
        write(*arguments)
        time.sleep(0.2)

    monkeypatch.setattr(ScratchFile, "write", slowly)
    model = make_model("dense")
    memory = MemoryConfig(min_swap_bytes=0)
    result = run_bench(model, random_batch(model, 16, TOKENS), ["layer-swap"], setting="", rounds=1, memory=memory)
    assert result["layer-swap"].swap is not None and result["layer-swap"].swap.num_begun > 0
