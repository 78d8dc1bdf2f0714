"""What a graph was traced from, and a plan is made for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actmem.errors import PlanError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model and batch that a graph was traced from, or a plan made for. `regions`: kind of each layer (its class
    and a digest of its parameters' shapes); `inputs`: shape of each region input by name; `dtypes` of the parameters;
    `autocast` dtype or ``None``; `layout`: over how many ranks which of its parameters are spread, such as ``tp 2``."""

    model: str
    regions: tuple[str, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    autocast: str | None = None
    layout: str | None = None

    def differences(self, other: Fingerprint) -> list[str]:
        """Each field in which `other` differs, in words; empty for an equal fingerprint."""
        found = []
        if len(self.regions) != len(other.regions):
            found.append(f"the plan has {len(self.regions)} layers, the model {len(other.regions)}")
        else:
            pairs = enumerate(zip(self.regions, other.regions, strict=True))
            unequal = [(layer, mine, theirs) for layer, (mine, theirs) in pairs if mine != theirs]
            if unequal:
                layer, mine, theirs = unequal[0]
                found.append(f"{len(unequal)} layers differ, first layer {layer}: plan {mine}, model {theirs}")
        for name in ("model", "dtypes", "inputs", "autocast", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: plan {_plain(name, mine)}, here {_plain(name, theirs)}")
        return found

    def refuse_other_inputs(self, plan: str, inputs: tuple[str, ...], autocast: str | None) -> None:
        """`PlanError` where the plan of this name was not made for layers that are given `inputs`, each variant that
        some layer is given, under `autocast`."""
        variants = variants_of(self.inputs)
        other = next((each for each in variants_of(inputs) if each not in variants), None) if self.inputs else None
        met = replace(self, inputs=other or self.inputs, autocast=autocast if self.inputs else self.autocast)
        differences = self.differences(met)
        if differences:
            raise PlanError("\n  ".join([f"the plan {plan} was made for other inputs:", *differences]))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint whose `asdict` this is."""
        lists = {name: tuple(data[name]) for name in ("regions", "dtypes", "inputs")}
        return cls(model=data["model"], autocast=data["autocast"], layout=data.get("layout"), **lists)


_ABSENT = {"autocast": "off", "layout": "whole layers in each process"}


def _plain(name: str, value: object) -> str:
    if value is None:
        return _ABSENT[name]
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_OR = "or"


def joined_variants(variants: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """`Fingerprint.inputs` for layers that are not all given the same, as where only some have a mask."""
    joined: list[str] = []
    for variant in variants:
        joined += [_OR, *variant] if joined else variant
    return tuple(joined)


def variants_of(inputs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What `joined_variants` has joined."""
    found: list[tuple[str, ...]] = [()]
    for line in inputs:
        if line == _OR:
            found.append(())
        else:
            found[-1] = (*found[-1], line)
    return found
