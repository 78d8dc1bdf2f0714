"""Values as a message shows them."""

from __future__ import annotations

import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shown(value: object) -> str:
    """A value as the YAML would have it, on one line, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:  # Python may refuse to print it
        return f"a number of {value.bit_length()} bits"
    return _short.repr(value)
