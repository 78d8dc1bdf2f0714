"""From a YAML file, a text or a mapping to a `RunConfig`, or to one `ConfigError` with every fault.

    text -> Document -> overrides -> fields against the schema -> rules between fields -> RunConfig

The steps pass faults on rather than stop at the first: a rule is skipped only where one of its own fields is at fault.
Apart from looking whether the paths it names exist, and into a model's config.json for its sizes,
nothing on the disk or a device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from actmem.config.complaint import Complaint
from actmem.config.document import UNREADABLE, Document, from_mapping, in_order, read_document
from actmem.config.overrides import apply_overrides
from actmem.config.rules import RULES
from actmem.config.schema import MemoryConfig, RunConfig
from actmem.config.sound_part import Dropped
from actmem.config.translation import field_fault, said_of
from actmem.config.ways import WAYS, ways_at_once
from actmem.config.wording import dotted, nearest
from actmem.errors import ConfigError, Fault

PLANNING_KEYS = ("activation_swap", "recompute", "recompute_comm", "swap", "platform", "allow_unverified_model")
_MAX_FILE_BYTES = 2**20
_MAX_REPEATS = 20


@dataclass(frozen=True)
class Reading:
    """What came of a configuration: itself, as far as it is sound (``None``: no section can be told), all of its
    faults in the order of the file, and where in the file everything stands."""

    config: RunConfig | None
    faults: tuple[Fault, ...]
    document: Document


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run configuration in the YAML file at `path`, with overrides such as ``train.steps=20`` laid over it.

    Relative paths in the file (`model.path`, `plan`, `data.path`, `data.tokenizer`, `data.cache_dir`,
    `memory.disk_path`, `train.output_dir`) are seen from the current working directory, not from the file's.

    Raises `ConfigError` with every fault of the file and the overrides.
    """
    return _sound(read_config(path, overrides), str(path))


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """As `load_config`, for whoever wants to look further, beyond the faults that there are."""
    try:
        text = _read_text(Path(path))
    except (OSError, ValueError) as error:
        return Reading(None, (_file_fault(path, error),), Document())
    return _read(read_document(text), overrides)


def parse_config(
    text_or_mapping: str | Mapping[str, object], source: str | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """The run configuration in a YAML text or a mapping of the same shape; `source` names it in messages.

    Relative paths are seen from the current working directory. Raises `ConfigError` with every fault; those of a
    mapping or an override have no line.
    """
    read = read_document(text_or_mapping) if isinstance(text_or_mapping, str) else from_mapping(text_or_mapping)
    return _sound(_read(read, overrides), source)


def parse_sections(sections: Mapping[str, object], num_layers: int | None) -> RunConfig:
    """A configuration of nothing but the sections that say what becomes of activations, for `num_layers` layers.

    ``None`` stands for a number that is not known, such as that of a model of which one rank has some stages.
    Raises `ConfigError` with every fault.
    """
    return _sound(_read_sections(sections, num_layers), "the plan's sections")


def parse_memory(settings: Mapping[str, object]) -> MemoryConfig:
    """The `memory` section in a mapping. Raises `ConfigError` with every fault."""
    memory, faults = _read_memory(settings)
    if memory is None:
        raise ConfigError(faults, "the memory settings")
    return memory


def parse_sections_and_memory(
    sections: Mapping[str, object], num_layers: int | None, settings: Mapping[str, object]
) -> tuple[RunConfig, MemoryConfig]:
    """What `parse_sections` and `parse_memory` give. Raises `ConfigError` with every fault of both."""
    reading, (memory, faults) = _read_sections(sections, num_layers), _read_memory(settings)
    if memory is None:
        raise ConfigError([*reading.faults, *faults], "the plan's sections and the memory settings")
    return _sound(reading, "the plan's sections"), memory


def _read_sections(sections: Mapping[str, object], num_layers: int | None) -> Reading:
    known = {key: value for key, value in sections.items() if key in PLANNING_KEYS}
    allowed, problem = ", ".join(PLANNING_KEYS), "says nothing about what becomes of activations"
    unknown = [
        Fault(str(key), problem, allowed=allowed, nearest=nearest(key, PLANNING_KEYS))
        for key in sections
        if key not in known
    ]
    fields = {} if num_layers is None else {"model_type": "qwen3", "num_hidden_layers": num_layers}
    reading = _read(from_mapping({"model": {"config": fields}, "data": {"path": ["*"]}, **known}), ())
    return replace(reading, faults=(*unknown, *reading.faults))


def _read_memory(settings: Mapping[str, object]) -> tuple[MemoryConfig | None, list[Fault]]:
    document = from_mapping({"memory": dict(settings)})
    try:
        return MemoryConfig.model_validate(dict(settings)), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        return None, [
            field_fault(document, each["type"], ("memory", *each["loc"]), each["input"], said_of(each))
            for each in details
        ]


def _read(document: Document, overrides: Sequence[str]) -> Reading:
    document = apply_overrides(document, overrides)
    config, faults = _validate(document)
    faults += [fault for fault in _faults_of_repeats(document) if fault not in faults]
    return Reading(config, tuple(in_order(faults)), document)


def _faults_of_repeats(document: Document) -> Iterator[Fault]:
    """What is wrong in the values of keys that are given twice, with each in turn in the place of the first."""
    for location, repeat in document.repeats[:_MAX_REPEATS]:
        inside = (dotted(location), f"{dotted(location)}.", f"{dotted(location)}[")
        for fault in _validate(document.with_repeat(location, repeat))[1]:
            if fault.path == inside[0] or fault.path.startswith(inside[1:]):
                yield fault


def _sound(reading: Reading, source: str | None) -> RunConfig:
    if reading.config is None or reading.faults:
        raise ConfigError(reading.faults, source)
    return reading.config


def _validate(document: Document) -> tuple[RunConfig | None, list[Fault]]:
    """The configuration, as far as it is sound, and all faults; `None` where not even its sections can be told."""
    value = document.value
    if value is UNREADABLE:
        return None, document.faults
    if not isinstance(value, dict):
        return None, [*document.faults, field_fault(document, "model_type", (), value)]
    try:
        config, faults, dropped = RunConfig.model_validate(value), [], Dropped(value, ())
    except ValidationError as error:
        found = error.errors(include_url=False)
        told = [each for each in found if each["input"] is not UNREADABLE and each["loc"] not in document.odd_keys]
        faults = [field_fault(document, each["type"], each["loc"], each["input"], said_of(each)) for each in told]
        dropped = Dropped(value, [(each["type"], each["loc"]) for each in found])
        if dropped.everything:
            return None, [*document.faults, *faults]
        config = dropped.rest()
    complaints = [*ways_at_once(config, {way: value[way] for way in WAYS if way in value and dropped.holds((way,))})]
    complaints += _complaints_of_rules(config, dropped)
    sound = [each for each in complaints if each.value is not UNREADABLE]
    complained = [document.complained(each, dropped.original(each.location)) for each in sound]
    return config, [*document.faults, *faults, *complained]


def _complaints_of_rules(config: RunConfig, dropped: Dropped) -> Iterator[Complaint]:
    """What the rules find, of which each looks at fields that are all sound by themselves."""
    for rule in RULES:
        if not any(dropped.holds(tuple(field.split("."))) for field in rule.fields):
            yield from rule.check(config)


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise ValueError("is larger than 1 MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}") from None


def _file_fault(path: str | Path, error: OSError | ValueError) -> Fault:
    problem = str(error)
    if isinstance(error, FileNotFoundError):
        problem = "does not exist"
    elif isinstance(error, IsADirectoryError):
        problem = "is a directory"
    elif isinstance(error, OSError):
        problem = f"cannot be read: {error.strerror}"
    return Fault(str(path), problem, str(path), "a YAML file in UTF-8")
