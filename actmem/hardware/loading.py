"""From the name of a device, or a file that a calibration wrote, to its profile, or to every fault of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actmem.config.document import UNREADABLE, Document, read_document
from actmem.config.shown import shown
from actmem.config.wording import A_NUMBER_OF_BYTES, dotted, kind_of, nearest
from actmem.errors import Fault, HardwareError
from actmem.hardware.profile import Collectives, Copying, Efficiency, Hardware, Rate, Shares

FORMAT_VERSION = 1
FORMAT_KEY = "actmem_hardware"
_FILE_ENDINGS = {".yaml", ".yml"}
_CLOSE_ENOUGH = 0.7  # names of devices are short, and much alike
_KEYS = {each.__name__: tuple(each.model_fields) for each in (Hardware, Rate, Shares, Efficiency, Copying, Collectives)}
_SECTIONS = {"link": "Copying", "disk": "Copying", "collectives": "Collectives", "efficiency": "Efficiency"}


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The profile of a device by its name or alias, such as ``h100-sxm``, ``H100`` or ``cpu``, or from the YAML file at
    a path.

    Case, ``_`` and ``-`` do not count in a name; a name goes before a file that is called the same. Raises
    `HardwareError`, with every fault where it is a file.
    """
    devices = _devices()
    known = _aliases().get(_plain(str(name_or_path)))
    if known is not None:
        return devices[known]
    path = Path(name_or_path) if isinstance(name_or_path, str | Path) and str(name_or_path) else None
    if path is not None and (path.suffix in _FILE_ENDINGS or _exists(path)):
        return parse_hardware(_read(path), str(path))
    named = str(name_or_path)
    is_name = isinstance(name_or_path, str | Path)
    problem = f"{shown(named)} is neither a known device nor a file" if is_name else f"is {kind_of(name_or_path)}"
    allowed = f"{', '.join(devices)}, or a YAML file that actmem calibrate wrote"
    closest = _aliases().get(nearest(named, _aliases(), closeness=_CLOSE_ENOUGH) or "")
    raise HardwareError([Fault("hardware", problem, named, allowed, closest)], "the hardware")


def parse_hardware(text: str, source: str | None = None) -> Hardware:
    """The profile in a YAML text; `source` names it in messages. Raises `HardwareError` with every fault."""
    document = read_document(text)
    value = document.value
    if value is UNREADABLE:
        raise HardwareError(document.faults, source)
    if not isinstance(value, dict) or value.get(FORMAT_KEY) != FORMAT_VERSION:
        begin = f"a hardware profile, with '{FORMAT_KEY}: {FORMAT_VERSION}' in it, as actmem calibrate writes it"
        raise HardwareError([document.fault((), "is no hardware profile", allowed=begin)], source)
    fields = {key: entry for key, entry in value.items() if key != FORMAT_KEY}
    hardware, faults = _validate(document, fields)
    if hardware is None or faults:
        raise HardwareError(sorted(faults, key=lambda fault: (fault.line or 0, fault.column or 0)), source)
    return hardware


def device_names() -> tuple[str, ...]:
    """The devices that are known by name."""
    return tuple(_devices())


def recognise_device(description: str) -> Hardware | None:
    """The known device in what a driver calls it, such as ``NVIDIA H100 80GB HBM3``; ``None`` if there is none, as for
    the laptop's edition of a card."""
    words = re.split(r"[^a-z0-9]+", description.lower())
    if "laptop" in words:
        return None
    return next((_devices()[name] for alias, name in _aliases().items() if alias in words), None)


def _validate(document: Document, fields: Mapping[str, object]) -> tuple[Hardware | None, list[Fault]]:
    try:
        return Hardware.model_validate(fields), document.faults
    except ValidationError as error:
        found = [each for each in error.errors(include_url=False) if each["input"] is not UNREADABLE]
        return None, [*document.faults, *(_fault(document, each) for each in found)]


def _fault(document: Document, error: Any) -> Fault:
    """Pydantic's finding in actmem's own words."""
    location, value, kind = error["loc"], error["input"], error["type"]
    if kind != "missing" and location[-1] == "peak" and location not in document.places:
        location = location[:-1]  # a rate that is a number alone
    if kind == "missing":
        return document.fault(location, "is missing")
    if kind == "extra_forbidden":
        keys = _keys_beside(location)
        problem = f"is not a key of {dotted(location[:-1])}"
        closest = nearest(location[-1], keys)
        return document.fault(location, problem, value=value, allowed=", ".join(keys), nearest=closest)
    allowed = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "value_error" and isinstance(value, str):
        allowed = A_NUMBER_OF_BYTES
    if kind == "less_than" and isinstance(value, str):
        return document.fault(location, f"{shown(value)} is out of range", value=value, allowed=allowed)
    if isinstance(value, bool | int | float) and kind != "finite_number" and not kind.endswith("_type"):
        problem = f"{value if isinstance(value, bool) else format(value, 'g')} is out of range"
    else:
        problem = f"{shown(value)} is {'not finite' if kind == 'finite_number' else kind_of(value)}"
    return document.fault(location, problem, value=value, allowed=allowed)


def _keys_beside(location: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that may stand where an unknown one does."""
    if len(location) == 1:
        return _KEYS["Hardware"]
    if len(location) == 2:
        return _KEYS[_SECTIONS.get(str(location[0]), "Rate")]
    return _KEYS["Shares" if location[0] == "efficiency" else "Rate"]


def _exists(path: Path) -> bool:
    """Whether there is something; a name that no file can have counts as a no."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        not_text = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        reason = error.strerror if isinstance(error, OSError) else not_text
        fault = Fault(str(path), f"cannot be read: {reason}", str(path), "a YAML file that actmem calibrate wrote")
        raise HardwareError([fault], str(path)) from None


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """`devices.yaml`: name -> all keys of a device."""
    text = (files("actmem.hardware") / "devices.yaml").read_text(encoding="utf-8")
    content: Any = read_document(text).value
    return {name: {"name": name, **content["common"], **device} for name, device in content["devices"].items()}


@cache
def _devices() -> dict[str, Hardware]:
    known = {name: {key: entry for key, entry in each.items() if key != "aliases"} for name, each in _shipped().items()}
    return {name: Hardware.model_validate(each) for name, each in known.items()}


@cache
def _aliases() -> dict[str, str]:
    """What devices may be called, without case and dashes -> their names."""
    return {_plain(alias): name for name, each in _shipped().items() for alias in (name, *each.get("aliases", ()))}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
