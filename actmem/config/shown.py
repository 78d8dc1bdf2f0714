"""Values as a message shows them."""

from __future__ import annotations

import reprlib


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 128:  # Python may refuse to print it
            return f"a number of {x.bit_length()} bits"
        return super().repr_int(x, level)


_MAX_LENGTH = 1000
_short = _Short()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2


def quoted(text: str) -> str:
    """A text such as a pattern as YAML has it between single quotes, backslashes as they are; shortened."""
    if not text.isprintable() or "'" in text or len(text) > _short.maxstring:
        return _short.repr(text)
    return f"'{text}'"


def bounded(value: object) -> object:
    """A value as it is, or as a message shows it where it is long."""
    return value if len(str(value)) <= _MAX_LENGTH else shown(value)


def shown(value: object) -> str:
    """A value as the YAML would have it, on one line, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _short.repr(value)
