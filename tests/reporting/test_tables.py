"""Tables line up, and their numbers are the result's."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from actmem.measuring.agreement import Agreement
from actmem.measuring.result import BenchResult
from actmem.reporting.explanation import Explanation, OpRow
from actmem.reporting.tables import bench_notes, bench_table, explain_table, explain_title


def lines_of(table: Table, width: int = 160) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def row(path: str, held: int = 0, dropped: int = 0, flops: int = 0, moved: int = 0, action: str = "save") -> OpRow:
    return OpRow(path, "2x8 fp32", held, dropped, 0, flops, moved, action, "saved by plan")


@pytest.fixture
def explanation() -> Explanation:
    rows = (
        row("mlp.mm", held=1_048_576, flops=3 * 10**9, moved=2 * 10**6),
        row("mlp.silu", dropped=4096, action="recompute"),
    )
    return Explanation("Layer", (0, 1, 2, 5), "selective", rows)


def test_each_policy_has_its_line(result: BenchResult) -> None:
    found = {line.split()[0]: " ".join(line.split()) for line in lines_of(bench_table(result))}
    assert found["none"] == "none 1,200.0 1.00 110 105 - 115 1.00 1,000.0 0.0 1.0 0 equal"
    assert found["selective"] == "selective 600.0 0.50 121 115 - 126 1.10 400.0 600.0 1.0 1,234 equal"
    assert found["torch-full"] == "torch-full 305.0 0.25 176 168 - 184 1.60 - - - - equal"


def test_numbers_end_where_their_heads_end(result: BenchResult) -> None:
    lines = lines_of(bench_table(result))
    rows = [line for line in lines if line.strip().startswith(("none", "selective", "full", "torch"))]
    end = lines[1].index("MiB") + len("MiB")
    assert len(rows) == 4
    assert all(line[end - 1].isdigit() and line[end] == " " for line in rows)


def test_notes_tell_floor_and_reasons(result: BenchResult) -> None:
    floor, reasons, ratios = bench_notes(result)
    assert "the median, over rounds, of the ratio in each round" in ratios
    assert "500.0 MiB; selective peaks at 1.20 of it" in floor
    assert reasons == "Always saved, whatever the plan says: random 1.00 MiB."


def test_a_floor_without_selective(result: BenchResult) -> None:
    assert bench_notes(replace(result, policies=result.policies[:1]))[0].endswith("500.0 MiB.")


def test_wrong_numbers_are_shouted(result: BenchResult) -> None:
    wrong = replace(result.policies[2], agreement=Agreement(difference=0.02, allowed=0.0))
    result = replace(result, policies=(*result.policies[:2], wrong))
    assert "WRONG NUMBERS under full" in bench_notes(result)[-1]
    assert any("OFF by 2.0e-02" in line for line in lines_of(bench_table(result)))


def test_steps_that_do_not_repeat_are_explained(result: BenchResult) -> None:
    policies = tuple(replace(each, agreement=Agreement(1e-7, 3e-7)) for each in result.policies)
    result = replace(result, policies=policies)
    assert any("within 3.0e-07" in note for note in bench_notes(result))
    assert any("equal within spread" in line for line in lines_of(bench_table(result)))


def test_the_totals_row_adds_up(explanation: Explanation) -> None:
    lines = lines_of(explain_table(explanation))
    assert " ".join(lines[-1].split()) == "total 1,048,576 4,096 - 3.00 1,500.0"


def test_ops_are_told_in_full(explanation: Explanation) -> None:
    lines = [" ".join(line.split()) for line in lines_of(explain_table(explanation))]
    assert "mlp.mm 2x8 fp32 1,048,576 - - 3.00 1,500.0 save saved by plan" in lines
    assert "mlp.silu 2x8 fp32 - 4,096 - - - recompute saved by plan" in lines
    assert any("GFLOP" in line for line in lines)


def test_titles_name_layers_by_range(explanation: Explanation) -> None:
    assert explain_title(explanation) == "Layer, layers 0-2, 5, plan selective"
    assert explain_title(replace(explanation, layers=(3,))) == "Layer, layer 3, plan selective"
