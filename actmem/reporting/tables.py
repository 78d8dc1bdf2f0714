"""Tables for the terminal: numbers to the right, units in the heads."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from actmem.config.layers import to_ranges
from actmem.measuring.result import BenchResult, PolicyResult
from actmem.planning.prices import Price
from actmem.reporting.explanation import Explanation, OpRow
from actmem.units import format_bytes

NOTHING = "-"
_MIB = 2**20
_SCALES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
_BENCH_HEADS = (
    "peak\nMiB",
    "of none",
    "step\nms",
    "quartiles\nms",
    "of none",
    "held\nMiB",
    "recomputed\nMiB",
    "always\nsaved MiB",
    "ops\nre-run",
)


_PRICE_HEADS = ("time\nus", "frees\nGB/s", "at peaks\nGB/s")
_SWAP_HEADS = (
    "resident\nMiB",
    "to swap\nMiB",
    "out\nMiB",
    "in\nMiB",
    "stayed\nMiB",
    "copies\nms",
    "waited\nms",
    "hidden\n%",
    "bound\nms",
    "fastest\nof bound",
)


def bench_table(result: BenchResult) -> Table:
    """One line a policy; ``-`` stands for what torch's own ways of recomputing do not tell."""
    table = plain_table("policy", _BENCH_HEADS, ("loss and\ngradients",))
    for each in result.policies:
        table.add_row(*_bench_cells(result, each))
    return table


def swap_table(result: BenchResult) -> Table:
    """One line a policy: by how much the process had grown at the end of the forward pass, and what was copied.

    ``bound`` is the longest of the fastest unplanned step and the copies of either direction; beside it stands the
    fastest step by it.
    """
    table = plain_table("policy", _SWAP_HEADS, ())
    for each in result.policies:
        table.add_row(each.policy, *_swap_cells(result, each))
    return table


def bench_notes(result: BenchResult) -> list[str]:
    """What the table cannot say, a sentence a line."""
    notes = [f"Floor of all plans that re-run no matmul or attention: {_mib(result.floor_bytes)} MiB{_over(result)}."]
    reasons = {reason: size for each in result.policies for reason, size in _always_saved(each).items()}
    if reasons:
        listed = ", ".join(f"{reason} {format_bytes(size)}" for reason, size in sorted(reasons.items()))
        notes.append(f"Always saved, whatever the plan says: {listed}.")
    notes.append(
        "A step by that of none is the median, over rounds, of the ratio in each round; the ratio of the two medians, "
        "which stand beside it, may be another one."
    )
    if not result.is_repeatable:
        allowed = result.baseline.agreement.allowed
        notes.append(
            f"Two unplanned steps do not give equal bits here; numbers are compared within {allowed:.1e} of a tensor's "
            "largest number, twice the difference that unplanned steps have."
        )
    if result.disagreeing:
        notes.append(
            f"WRONG NUMBERS under {', '.join(result.disagreeing)}: do not train with them; please report this."
        )
    return notes


def explain_table(explanation: Explanation) -> Table:
    """One line an op, in order, and the totals below. Bytes are exact, so that they add up as they stand."""
    scale, unit = _flop_scale(max((row.flops for row in explanation.rows), default=0))
    heads: tuple[str, ...] = ("held\nbytes", "recomputed\nbytes", "swapped\nbytes", unit, "FLOP\nper byte")
    is_priced = any(row.price for row in explanation.rows)
    heads = (*heads, *_PRICE_HEADS) if is_priced else heads
    table = plain_table("op", ("output", *heads), ("action", "why"), footer=True)
    for row in explanation.rows:
        table.add_row(*_explain_cells(row, scale, is_priced), style="" if row.action else "dim")
    for column, text in zip(table.columns, _explain_cells(explanation.total, scale, is_priced), strict=True):
        column.footer = Text(text)
    return table


def explain_title(explanation: Explanation) -> str:
    """Which layers the table speaks of, and under which plan."""
    noun = "layer" if len(explanation.layers) == 1 else "layers"
    return f"{explanation.kind}, {noun} {', '.join(to_ranges(explanation.layers))}, plan {explanation.plan}"


def plain_table(first: str, numbers: tuple[str, ...], texts: tuple[str, ...], *, footer: bool = False) -> Table:
    """A table with a column for each head: the first, then numbers, then texts."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=footer, padding=(0, 1), pad_edge=False)
    # Where a terminal is narrow, the first and the last column give way; numbers never do.
    table.add_column(first, overflow="fold", min_width=8, vertical="bottom")
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True, min_width=len(head.split("\n")[-1]), vertical="bottom")
    for head in texts:
        gives_way = head == texts[-1]
        table.add_column(
            head,
            no_wrap=not gives_way,
            overflow="fold" if gives_way else "ellipsis",
            min_width=max(map(len, head.split())),
            vertical="bottom",
        )
    return table


def _bench_cells(result: BenchResult, each: PolicyResult) -> list[str]:
    first, third = each.timing.quartiles
    return [
        each.policy,
        _mib(each.peak_bytes),
        f"{result.peak_ratio(each):.2f}",
        _ms(each.timing.median),
        f"{_ms(first)} - {_ms(third)}",
        f"{result.step_ratio(each):.2f}",
        *_holding_cells(each),
        _agreement(each),
    ]


def _holding_cells(each: PolicyResult) -> list[str]:
    if each.holdings is None:
        return [NOTHING] * 4
    held = each.holdings
    always = sum(held.always_saved_bytes.values())
    return [_mib(held.held_bytes), _mib(held.dropped_bytes), _mib(always), f"{held.num_replayed_ops:,}"]


def _swap_cells(result: BenchResult, each: PolicyResult) -> list[str]:
    grown = NOTHING if each.resident_bytes is None else _mib(each.resident_bytes)
    if each.swap is None or each.holdings is None:
        return [grown] + [NOTHING] * (len(_SWAP_HEADS) - 1)
    swap, bound = each.swap, result.bound_seconds(each.swap)
    return [
        grown,
        _mib(each.holdings.swapped_bytes),
        _mib(swap.bytes_out),
        _mib(swap.bytes_in),
        _mib(swap.bytes_stayed),
        _ms(swap.copy_out_seconds + swap.copy_in_seconds),
        _ms(swap.exposed_seconds),
        NOTHING if swap.hidden_share is None else f"{100 * swap.hidden_share:.0f}",
        _ms(bound),
        f"{each.timing.fastest / bound:.2f}",
    ]


def _agreement(each: PolicyResult) -> str:
    if each.agreement.is_bitwise:
        return "equal"
    return "equal within spread" if each.agreement.holds else f"OFF by {each.agreement.difference:.1e}"


def _always_saved(each: PolicyResult) -> dict[str, int]:
    return {} if each.holdings is None else each.holdings.always_saved_bytes


def _over(result: BenchResult) -> str:
    found = [each for each in result.policies if each.policy == "selective"]
    return "".join(f"; selective peaks at {each.peak_bytes / result.floor_bytes:.2f} of it" for each in found)


def _explain_cells(row: OpRow, scale: float, is_priced: bool) -> list[str]:
    return [
        row.path,
        row.output,
        f"{row.held_bytes:,}" if row.held_bytes else NOTHING,
        f"{row.dropped_bytes:,}" if row.dropped_bytes else NOTHING,
        f"{row.swapped_bytes:,}" if row.swapped_bytes else NOTHING,
        f"{row.flops / scale:.2f}" if row.flops else NOTHING,
        NOTHING if row.intensity is None else f"{row.intensity:,.1f}",
        *(_price_cells(row.price) if is_priced else ()),
        row.action,
        row.reason,
    ]


def _price_cells(price: Price | None) -> list[str]:
    if price is None:
        return [NOTHING] * len(_PRICE_HEADS)
    rates = [NOTHING if rate is None else f"{rate / 1e9:,.1f}" for rate in (price.rate, price.peak_rate)]
    return [f"{price.seconds * 1e6:,.1f}{'*' if price.is_measured else ''}" if price.seconds else NOTHING, *rates]


def _flop_scale(largest: int) -> tuple[float, str]:
    return next((pair for pair in _SCALES if largest >= pair[0]), (1.0, "FLOP"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
