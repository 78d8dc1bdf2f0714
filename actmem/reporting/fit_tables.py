"""What `actmem fit` found, for the terminal."""

from __future__ import annotations

from rich.table import Table

from actmem.planning.fit import Fit, Reach
from actmem.reporting.tables import NOTHING, plain_table
from actmem.units import format_bytes

_REACH_HEADS = ("micro-batch", "sequence", "peak", "of the\ndevice", "time of\na token", "added\n%")


def need_table(fit: Fit) -> Table:
    """What the peaks are made of: without a plan, under the fastest plan that fits, and at the least."""
    needs = {"no plan": fit.unplanned, "least peak": fit.least}
    if fit.verdict == "fits with a plan" and fit.planned is not None:
        needs = {"no plan": fit.unplanned, fit.planned.plan: fit.planned, "least peak": fit.least}
    table = plain_table("at the peak", tuple(needs), ())
    for use in dict.fromkeys(use for need in needs.values() for use in need.bytes_by_use):
        table.add_row(use, *(_bytes(need.bytes_by_use.get(use, 0)) for need in needs.values()))
    table.add_section()
    table.add_row("all", *(format_bytes(need.peak_bytes) for need in needs.values()), style="bold")
    if any(need.swapped_bytes for need in needs.values()):
        table.add_row("swapped, elsewhere", *(_bytes(need.swapped_bytes) for need in needs.values()))
    table.add_row("step, ms", *(f"{need.seconds * 1e3:,.1f}" for need in needs.values()))
    return table


def reach_table(fit: Fit) -> Table:
    """The largest micro-batch, then the longest sequence, that fits each way."""
    table = plain_table("way", _REACH_HEADS, ("largest",))
    for number, reach in enumerate(fit.reaches):
        if number and reach.dimension != fit.reaches[number - 1].dimension:
            table.add_section()
        table.add_row(reach.way, *_reach_cells(fit, reach), reach.dimension)
    return table


def _bytes(size: int) -> str:
    return format_bytes(size) if size else NOTHING


def _reach_cells(fit: Fit, reach: Reach) -> list[str]:
    if reach.shape is None or reach.peak_bytes is None or reach.token_ratio is None or reach.added_share is None:
        return [NOTHING, NOTHING, "too much", NOTHING, NOTHING, NOTHING]
    share = reach.peak_bytes / fit.memory_bytes
    figures = [
        format_bytes(reach.peak_bytes),
        f"{share:.0%}",
        f"{reach.token_ratio:.3f}",
        f"{100 * reach.added_share:.1f}",
    ]
    return [*map(str, reach.shape), *figures]
