"""Every error actmem raises on purpose.

    ActmemError
    ├── ConfigError (ValueError)         a configuration with faults; `.faults` lists all of them
    │   └── HardwareError                a device that is not known, or a profile of one with faults
    ├── PlanError (ValueError)           a plan that is malformed, or made for another model or shape
    ├── PlatformError (NotImplementedError)  a platform other than torch
    ├── ApplyError (ValueError)          a model that a plan cannot be applied to
    ├── LayoutError (ValueError)         a model that cannot be laid out over the ranks there are
    ├── RankError (RuntimeError)         a process that the others waited for in vain
    ├── ModelError (ValueError)          a model that cannot be built or loaded
    ├── DataError (ValueError)           a corpus or tokenizer that cannot be used
    ├── CheckpointError (ValueError)     a checkpoint that cannot be written, read or resumed
    ├── MeasurementError (RuntimeError)  a figure that could not be measured as it must be
    ├── InPlaceEditError (RuntimeError)  a tensor edited in place after the backward pass came to need it
    ├── ReplayMismatchError (RuntimeError)  a recomputed value that differs from the one it stands for
    ├── SwapError (RuntimeError)         a swapped value that cannot be brought back as it was
    └── NonFiniteError (FloatingPointError)  a loss that is infinite or not a number

Each also derives from the built-in error that a caller who does not know actmem would catch. A message says what is
wrong with its value, what was allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class ActmemError(Exception):
    """Root of all errors that actmem raises on purpose. `is_repeated`: another process of the same run says it too."""

    is_repeated = False


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a configuration.

    `path` is the dotted place in the YAML (``train.lr``), `line` and `column` count from 1 (``None`` when the
    configuration did not come from a file), `value` is what stood there, `problem` what is wrong with it, `allowed`
    what may stand there and `nearest` the closest valid name, where there is one.
    """

    path: str
    problem: str
    value: object = None
    allowed: str | None = None
    nearest: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"line {self.line}, {self.path}"
        text = f"{where}: {self.problem}"
        if self.allowed is not None:
            text += f"; allowed: {self.allowed}"
        if self.nearest is not None:
            text += f"; did you mean {self.nearest!r}?"
        return text


class ConfigError(ActmemError, ValueError):
    """A configuration with one or more faults, all of them in `faults`, in the order of the file."""

    def __init__(self, faults: Sequence[Fault], source: str | None = None) -> None:
        self.faults = tuple(faults)
        self.source = source
        noun = "fault" if len(self.faults) == 1 else "faults"
        head = f"{len(self.faults)} {noun} in {source or 'the configuration'}"
        super().__init__("\n  ".join([f"{head}:", *map(str, self.faults)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """As other processes hear of it."""
        return type(self), (self.faults, self.source)


class HardwareError(ConfigError):
    """A device that is not known, or a profile of one that cannot be true, be read or be written."""


class PlanError(ActmemError, ValueError):
    """A plan that is malformed, or that was made for another model, shape or dtype. What is wrong in a plan file is in
    `faults`, one by one."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class ApplyError(ActmemError, ValueError):
    """A model or region that a plan cannot be applied to; the model is left as it was."""


class PlatformError(ActmemError, NotImplementedError):
    """A platform that actmem does not run on."""


class LayoutError(ActmemError, ValueError):
    """A model that cannot be laid out over the ranks there are, or not in that order."""


class RankError(ActmemError, RuntimeError):
    """A process of the run that the others waited for in vain."""


class ModelError(ActmemError, ValueError):
    """A model that cannot be built or loaded."""


class DataError(ActmemError, ValueError):
    """A corpus or tokenizer that cannot be used."""


class CheckpointError(ActmemError, ValueError):
    """A checkpoint that cannot be written, read or resumed from."""


class MeasurementError(ActmemError, RuntimeError):
    """A figure that could not be measured in a way that makes it comparable."""


class InPlaceEditError(ActmemError, RuntimeError):
    """A tensor that the backward pass needs was edited in place after it was saved."""


class ReplayMismatchError(ActmemError, RuntimeError):
    """A recomputed value differs from the value it stands for; training must not go on."""


class SwapError(ActmemError, RuntimeError):
    """A swapped value cannot be read back, or not as it was; training must not go on."""


class NonFiniteError(ActmemError, FloatingPointError):
    """A loss or gradient that is not a number; no optimizer step was taken with it."""
