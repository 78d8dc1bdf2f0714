"""A profile as a YAML file that `load_hardware` reads."""

from __future__ import annotations

import io
from pathlib import Path

from ruamel.yaml import YAML

from actmem.errors import Fault, HardwareError
from actmem.files import replace_file
from actmem.hardware.loading import FORMAT_KEY, FORMAT_VERSION
from actmem.hardware.profile import Hardware

_HEAD = """\
# A device, measured by actmem calibrate. Rates are FLOP or bytes in a second; times are seconds.
# `peak` is the most, `reached` what was seen; `measured_ops` are ops of a training step by name, shapes and dtypes.
"""


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a profile; whoever reads finds the old file or the whole new one. Raises `HardwareError`."""
    path = Path(path)
    try:
        replace_file(path, _text_of(hardware))
    except OSError as error:
        raise HardwareError([write_fault(path, error.strerror or str(error))], str(path)) from error


def write_fault(path: Path, reason: str) -> Fault:
    """That a profile cannot be written to `path`."""
    return Fault(str(path), f"cannot be written: {reason}", str(path), "a file in a folder that exists")


def _text_of(hardware: Hardware) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 10_000  # one line a signature
    stream = io.StringIO()
    yaml.dump({FORMAT_KEY: FORMAT_VERSION, **hardware.model_dump(exclude_none=True)}, stream)
    return _HEAD + stream.getvalue()
