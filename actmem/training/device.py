"""The device a run trains on."""

from __future__ import annotations

import torch

from actmem.config.schema import RunConfig
from actmem.errors import ConfigError, Fault
from actmem.hardware import Hardware, load_hardware
from actmem.training.machine import device_name


def choose_device(name: str) -> torch.device:
    """The device of ``train.device``; ``auto`` is the accelerator where there is one. Raises `ConfigError`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError([Fault("train.device", "names no device", name, "auto, cpu, cuda, cuda:1, …")]) from error
    usable = device.type == "cpu" or (
        accelerator is not None
        and device.type == accelerator.type
        and (device.index or 0) < torch.accelerator.device_count()
    )
    if not usable:
        found = f"cpu or {accelerator.type}" if accelerator is not None else "cpu; there is no accelerator here"
        raise ConfigError([Fault("train.device", "is not there", name, f"auto, {found}")])
    return device


def device_at_hand(config: RunConfig, hardware: Hardware | None = None) -> torch.device | None:
    """The run's device, if what it is planned for, `hardware` or else what the configuration names, is such a one;
    ``None`` for a device elsewhere. Raises `HardwareError`, and `ConfigError` where ``auto`` finds none."""
    if hardware is None and config.hardware == "auto":
        return choose_device(config.train.device)
    profile = hardware or load_hardware(config.hardware)
    try:
        device = choose_device(config.train.device)
    except ConfigError:
        return None
    alike = profile.link is None if device.type == "cpu" else profile.name == device_name(device)
    return device if alike else None
