"""The engine: runs a model's regions under a plan."""

from actmem.runtime.apply import Applied, apply
from actmem.runtime.engine import NoEffectWarning
from actmem.runtime.functions import register_replayable
from actmem.runtime.kinds import register_subclass
from actmem.runtime.stats import RegionStats, Stats
from actmem.runtime.swap.tier import SwapWarning

__all__ = [
    "Applied",
    "NoEffectWarning",
    "RegionStats",
    "Stats",
    "SwapWarning",
    "apply",
    "register_replayable",
    "register_subclass",
]
