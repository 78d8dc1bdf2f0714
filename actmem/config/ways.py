"""The ways to say what becomes of activations: `memory_budget`, `policy`, `plan`, and the sections, which combine.

One of them may be used at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actmem.config.complaint import Complaint
from actmem.config.document import UNREADABLE
from actmem.config.schema import RunConfig
from actmem.config.shown import shown

WAYS = ("policy", "plan", "memory_budget")
"""Those that do not combine, in the order in which a message prefers to name them."""

_ALLOWED = "one of memory_budget, policy, plan, and the sections activation_swap, recompute, recompute_comm and swap"
_SWITCHES = ("activation_swap", "recompute.mode", "recompute_comm.enable", "swap.enable")


def used_sections(config: RunConfig) -> dict[str, object]:
    """The switches of the sections that are on, with their values."""
    values = (config.activation_swap, config.recompute.mode, config.recompute_comm.enable, config.swap.enable)
    return {name: value for name, value in zip(_SWITCHES, values, strict=True) if value not in ("none", "None", False)}


def ways_at_once(config: RunConfig, wrong: Mapping[str, object]) -> Iterator[Complaint]:
    """A complaint for each way that is used beside another one. `wrong` are the values of those in `WAYS` that are
    faulty: whatever was meant, a way was meant to be used."""
    given = [name for name in WAYS if name in wrong or getattr(config, name) is not None]
    if not given:
        return
    first = _described(config, given[0], wrong)
    for name in given[1:]:
        if name not in wrong:
            problem = f"is given beside {first}; both say what to save"
            allowed = f"one of {', '.join(WAYS)}; {given[0]}=null on the command line takes out what the file says"
            yield Complaint(name, problem, getattr(config, name), allowed)
    for switch, value in used_sections(config).items():
        problem = f"is given beside {first}; both say what becomes of activations"
        yield Complaint(switch, problem, value, _ALLOWED)


def _described(config: RunConfig, name: str, wrong: Mapping[str, object]) -> str:
    if name not in wrong:
        return f"{name}: {getattr(config, name)}"
    return name if wrong[name] is UNREADABLE else f"{name}: {shown(wrong[name])}"
