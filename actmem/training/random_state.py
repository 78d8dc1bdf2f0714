"""Every random generator a training step may draw from, as tensors that safetensors can hold."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

_NO_GAUSS = float("nan")


def capture_random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of Python's, NumPy's and torch's global generators, and that of `device` if it is an accelerator."""
    _, python_words, python_gauss = random.getstate()
    # NumPy's global generator is what user code that calls np.random draws from.
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "torch": torch.get_rng_state(),
        "python.words": torch.tensor(python_words, dtype=torch.int64),
        "python.gauss": torch.tensor(_NO_GAUSS if python_gauss is None else python_gauss, dtype=torch.float64),
        "numpy.key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy.pos": torch.tensor(numpy_state["state"]["pos"]),
        "numpy.has_gauss": torch.tensor(numpy_state["has_gauss"]),
        "numpy.gauss": torch.tensor(numpy_state["gauss"], dtype=torch.float64),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Set every generator as it was. A state from another kind of device leaves `device`'s generator alone."""
    torch.set_rng_state(state["torch"])
    gauss = state["python.gauss"].item()
    random.setstate((3, tuple(state["python.words"].tolist()), None if gauss != gauss else gauss))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": state["numpy.key"].numpy().astype(np.uint32), "pos": state["numpy.pos"].item()},
            "has_gauss": state["numpy.has_gauss"].item(),
            "gauss": state["numpy.gauss"].item(),
        }
    )
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of the accelerators included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
