"""Bytes and times as people write and read them. GiB = 2^30 bytes throughout."""

from __future__ import annotations

import re

MAX_BYTES = 2**63
_FACTORS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FACTORS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"60GiB"``, ``"1.5 MB"`` or a plain number, below `MAX_BYTES`; `ValueError` for anything else."""
    match = _BYTES.fullmatch(str(text))
    factor = _FACTORS.get((match[2] or "B").upper()) if match else None
    if match is None or factor is None:
        raise ValueError("is not a number of bytes")
    num_bytes = float(match[1]) * factor
    if num_bytes >= MAX_BYTES:
        raise ValueError("is more bytes than any device has; write less than 8388608TiB")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """``1536`` as ``'1.50 KiB'``: three figures, the largest binary unit that leaves at least one before the point."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{_decimals(value)}f} {unit}"
        value /= 1024
    return f"{value:.{_decimals(value)}f} TiB"


def shown_budget(budget: str | int | float) -> str:
    """A budget as it is written: bytes in their unit, anything else as it is."""
    return format_bytes(budget) if isinstance(budget, int) else str(budget)


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
