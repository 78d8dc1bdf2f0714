"""actmem: train transformers in less memory.

Every tensor that autograd saves for the backward pass is saved, recomputed or swapped, under one plan, to the last bit.

    applied = actmem.apply(model, "selective")
    model(**batch).loss.backward()
    applied.remove()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from actmem.config.loading import load_config, parse_config
from actmem.errors import (
    ActmemError,
    ApplyError,
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    InPlaceEditError,
    LayoutError,
    MeasurementError,
    ModelError,
    NonFiniteError,
    PlanError,
    PlatformError,
    RankError,
    ReplayMismatchError,
    SwapError,
)
from actmem.planning import Action, Plan, Rule

if TYPE_CHECKING:
    from actmem.planning.planner import Planned, plan
    from actmem.runtime import (
        Applied,
        NoEffectWarning,
        Stats,
        SwapWarning,
        apply,
        register_replayable,
        register_subclass,
    )
    from actmem.tracing import trace

__all__ = [
    "Action",
    "ActmemError",
    "Applied",
    "ApplyError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HardwareError",
    "InPlaceEditError",
    "LayoutError",
    "MeasurementError",
    "ModelError",
    "NoEffectWarning",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "Planned",
    "PlatformError",
    "RankError",
    "ReplayMismatchError",
    "Rule",
    "Stats",
    "SwapError",
    "SwapWarning",
    "apply",
    "load_config",
    "parse_config",
    "plan",
    "register_replayable",
    "register_subclass",
    "trace",
]

_IMPORTED_LATE = {"trace": "actmem.tracing", "plan": "actmem.planning.planner", "Planned": "actmem.planning.planner"}
_IMPORTED_LATE |= dict.fromkeys(
    ("Applied", "NoEffectWarning", "Stats", "SwapWarning", "apply", "register_replayable", "register_subclass"),
    "actmem.runtime",
)


def __getattr__(name: str) -> Any:
    """Import what needs torch or the solver when it is first asked for, so that ``actmem --help`` does not wait."""
    if name not in _IMPORTED_LATE:
        raise AttributeError(f"module 'actmem' has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_LATE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
