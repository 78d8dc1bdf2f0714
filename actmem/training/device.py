"""The device a run trains on."""

from __future__ import annotations

import torch

from actmem.errors import ConfigError, Fault


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
