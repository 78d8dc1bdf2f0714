"""What a bench found, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actmem.files import replace_file
from actmem.measuring.agreement import Agreement
from actmem.measuring.interleave import Timing
from actmem.planning.fates import INPUT, SAVED, SMALL
from actmem.runtime.swap.counters import SwapCounters

BASELINE = "none"


@dataclass(frozen=True)
class Holdings:
    """What the layers of a model hold until the backward pass, together, and what is recomputed or swapped instead.

    `held_bytes_by_reason` adds up to `held_bytes`: ``saved`` by the plan, ``input`` of a layer, or a reason for which
    something is always saved. A storage that two layers hold counts in both. `num_replayed_ops` is per step.
    """

    held_bytes: int
    dropped_bytes: int
    held_bytes_by_reason: Mapping[str, int]
    num_replayed_ops: int
    swapped_bytes: int = 0

    @property
    def always_saved_bytes(self) -> dict[str, int]:
        """The bytes that no plan drops, by reason."""
        return {
            reason: size for reason, size in self.held_bytes_by_reason.items() if reason not in (SAVED, INPUT, SMALL)
        }


@dataclass(frozen=True)
class PolicyResult:
    """One policy. `peak_bytes` is above parameters and standing gradients; `holdings` is ``None`` for torch's own ways
    of recomputing, which do not tell. `resident_bytes` is by how much the process had grown at the end of a forward
    pass, ``None`` where the kernel does not tell; `swap` counts what was copied in a step, the middle one of those
    timed, and is ``None`` for a policy that does not swap."""

    policy: str
    peak_bytes: int
    timing: Timing
    agreement: Agreement
    holdings: Holdings | None
    resident_bytes: int | None = None
    swap: SwapCounters | None = None


@dataclass(frozen=True)
class BenchResult:
    """All policies, ``none`` first. `num_tokens` is per step; `floor_bytes` the least peak of any plan that re-runs no
    matmul, attention or other compute-intensive op."""

    setting: str
    num_tokens: int
    policies: tuple[PolicyResult, ...]
    floor_bytes: int

    def __getitem__(self, policy: str) -> PolicyResult:
        return next(each for each in self.policies if each.policy == policy)

    @property
    def baseline(self) -> PolicyResult:
        """The unplanned model."""
        return self[BASELINE]

    def peak_ratio(self, result: PolicyResult) -> float:
        """A policy's peak by that of the unplanned model."""
        return result.peak_bytes / self.baseline.peak_bytes

    def step_ratio(self, result: PolicyResult) -> float:
        """A policy's step time by that of the unplanned model, round by round, the median of those."""
        return result.timing.ratio_to(self.baseline.timing)

    def totals(self, standing_bytes: int) -> dict[str, tuple[int, float]]:
        """By policy, the whole peak, with `standing_bytes` that it does not count, and the middle step time."""
        return {each.policy: (each.peak_bytes + standing_bytes, each.timing.median) for each in self.policies}

    def bound_seconds(self, swap: SwapCounters) -> float:
        """A step that computes what the unplanned one does, and copies this, can hardly be shorter: the longest of the
        fastest unplanned step and of the copies in each direction, which may run at the same time."""
        return max(self.baseline.timing.fastest, swap.copy_out_seconds, swap.copy_in_seconds)

    @property
    def is_repeatable(self) -> bool:
        """Whether unplanned steps give equal bits each time."""
        return self.baseline.agreement.allowed == 0.0

    @property
    def disagreeing(self) -> list[str]:
        """Policies whose loss or gradients are not those of the unplanned model."""
        return [each.policy for each in self.policies if not each.agreement.holds]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the ratios included; `from_dict` reads it back."""
        data = asdict(self)
        for item, result in zip(data["policies"], self.policies, strict=True):
            item["peak_ratio"] = self.peak_ratio(result)
            item["step_ratio"] = self.step_ratio(result)
            item["median_step_seconds"] = result.timing.median
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchResult:
        """The result that `to_dict` wrote."""
        policies = tuple(map(_policy_from_dict, data["policies"]))
        return cls(data["setting"], data["num_tokens"], policies, data["floor_bytes"])

    def save(self, path: str | Path) -> None:
        """Write the result as JSON."""
        replace_file(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read the result that `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _policy_from_dict(data: Mapping[str, Any]) -> PolicyResult:
    return PolicyResult(
        policy=data["policy"],
        peak_bytes=data["peak_bytes"],
        timing=Timing(tuple(data["timing"]["seconds"])),
        agreement=Agreement(**data["agreement"]),
        holdings=None if data["holdings"] is None else Holdings(**data["holdings"]),
        resident_bytes=data["resident_bytes"],
        swap=None if data["swap"] is None else SwapCounters(**data["swap"]),
    )
