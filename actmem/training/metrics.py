"""What a run measured, as JSON lines: one record a line, written out at once, so that a crash loses none.

`read_metrics` gives the records back. A resumed run first drops what lies behind its checkpoint, so that no step is
there twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from actmem.errors import DataError


@dataclass(frozen=True)
class StartRecord:
    """A run begins, or goes on after `step` optimizer steps."""

    step: int
    plan: str
    device: str
    num_parameters: int
    num_sequences: int
    peak_source: str
    num_ranks: int = 1


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `loss` is the mean cross-entropy of its targets in nats, `router_loss` the weighted auxiliary
    loss, `grad_norm` the norm before clipping, `peak_bytes` the peak of the run so far, `swap` the swap counters of
    this step where the plan swaps. Of several ranks `loss` is of all, `peak_bytes` the highest peak and `swap` of the
    first; `rank_peak_bytes` and `rank_swap` are those of each."""

    step: int
    loss: float
    router_loss: float | None
    learning_rate: float
    grad_norm: float
    num_tokens: int
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    swap: dict[str, float | None] | None = None
    rank_peak_bytes: list[int] | None = None
    rank_swap: list[dict[str, float | None]] | None = None


@dataclass(frozen=True)
class EvalRecord:
    """The mean cross-entropy of the held-out text, in nats a token, after `step` optimizer steps."""

    step: int
    eval_loss: float
    num_tokens: int


Record = StartRecord | StepRecord | EvalRecord
_KINDS: dict[str, type[StartRecord | StepRecord | EvalRecord]] = {
    "start": StartRecord,
    "step": StepRecord,
    "eval": EvalRecord,
}
_NAMES = {record_type: name for name, record_type in _KINDS.items()}


class MetricsLog:
    """The file of a run that stands at `step`, open while entered.

    Records of later steps and a broken last line are dropped first.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [record for record in _intact_records(path) if record.step <= step]
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a run, in order. Raises `DataError` where `path` is not there."""
    if not path.is_file():
        raise DataError(f"{path} is not there; give the metrics.jsonl of a run's output directory")
    return list(_intact_records(path))


def _line(record: Record) -> str:
    return json.dumps({"kind": _NAMES[type(record)], **asdict(record)}, allow_nan=False) + "\n"


def _intact_records(path: Path) -> Iterator[Record]:
    """Up to the first line that is cut short, which only a machine that lost power leaves."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields = json.loads(line)
            yield _KINDS[fields.pop("kind")](**fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            return
