from __future__ import annotations

from pathlib import Path

import pytest

from actmem.errors import DataError
from actmem.training.metrics import EvalRecord, MetricsLog, Record, StartRecord, StepRecord, read_metrics

START = StartRecord(0, "full", "cpu", 10, 20, "resident set high-water mark")
STEPS = [StepRecord(step, 2.5, None, 1e-3, 0.7, 64, 0.5, 128.0, 2**30) for step in (1, 2, 3)]
EVAL = EvalRecord(2, 2.25, 640)


def written(path: Path, records: list[Record], step: int = 0) -> list[Record]:
    with MetricsLog(path, step=step) as metrics:
        for record in records:
            metrics.write(record)
    return read_metrics(path)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = [START, *STEPS[:2], EVAL]
    assert written(tmp_path / "metrics.jsonl", records) == records


def test_each_record_is_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", step=0) as metrics:
        metrics.write(START)
        assert read_metrics(tmp_path / "metrics.jsonl") == [START]


def test_going_on_drops_what_lies_behind_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, [START, STEPS[0], STEPS[1], EVAL, STEPS[2]])
    assert written(path, [STEPS[2]], step=2) == [START, STEPS[0], STEPS[1], EVAL, STEPS[2]]
    assert written(path, [], step=1) == [START, STEPS[0]]


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, [START, *STEPS])
    path.write_text(path.read_text()[:-20])
    assert read_metrics(path) == [START, *STEPS[:2]]
    assert written(path, [STEPS[2]], step=3) == [START, *STEPS]


def test_numbers_that_json_has_no_word_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        written(tmp_path / "metrics.jsonl", [EvalRecord(1, float("nan"), 1)])


def test_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl is not there"):
        read_metrics(tmp_path / "metrics.jsonl")
