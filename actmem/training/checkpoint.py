"""Everything a run needs to go on as if it had never stopped, in one sealed directory a step.

    step-00000100/
      model.safetensors       parameters and persistent buffers, by name; tied parameters once
      optimizer.safetensors   its state tensors, as <parameter name>/<key>
      random.safetensors      the random generators
      state.json              step, place in the data, and a description of the model
      manifest.json           size and SHA-256 of each file, format version

No file is a pickle, so reading one runs no code.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from actmem.errors import CheckpointError
from actmem.training.random_state import capture_random_state, restore_random_state
from actmem.training.sealed_directory import (
    damage,
    remove_directory,
    remove_partial,
    seal,
    sealed_format,
    writing_directory,
)

FORMAT = 1
Position = dict[str, int | str]
# Fields of a Hugging Face configuration that may change between two runs of one model.
_RUN_FIELDS = {"transformers_version", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}


@dataclass(frozen=True)
class Resumed:
    """Where a restored run stands: optimizer steps done, the place in the data, and the checkpoint they came from."""

    step: int
    position: Position
    path: Path


class Checkpoints:
    """The checkpoints of one run: `save` writes one, `resume` restores from the newest that is intact."""

    def __init__(
        self, root: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, keep: int, device: torch.device
    ) -> None:
        self.root = root
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._device = device

    def steps(self) -> list[Path]:
        """The directories of finished checkpoints, oldest first, whether intact or not."""
        return sorted(self.root.glob("step-*[0-9]"))

    def save(self, step: int, position: Position) -> Path:
        """Write the checkpoint of `step`, then remove all but the newest `keep`.

        Raises `CheckpointError` where it cannot be written; the older ones are then all still there.
        """
        target = self.root / f"step-{step:08d}"
        try:
            with writing_directory(target) as directory:
                self._write(directory, step, position)
                seal(directory, FORMAT)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {target}: {error}; the earlier ones are intact; "
                "free space or set another train.output_dir, and start the run again"
            ) from error
        for old in self.steps()[: -self._keep]:
            remove_directory(old)
        return target

    def resume(self) -> Resumed | None:
        """Restore model, optimizer and random state from the newest intact checkpoint; `None` where there is none.

        A damaged one is set aside as `damaged-step-…` and named in a warning. Raises `CheckpointError` where all are
        damaged, and for one of another model or format: a run never silently starts over.
        """
        remove_partial(self.root)
        faults: dict[Path, str] = {}
        for path in reversed(self.steps()):
            fault = damage(path)
            if fault is None:
                resumed = self._restore(path)
                _set_aside(faults, path)
                return resumed
            faults[path] = fault
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.root} is intact ({_listed(faults)}); put an intact copy there, or remove them "
                "to start over"
            )
        return None

    def _write(self, directory: Path, step: int, position: Position) -> None:
        save_file(_contiguous(_model_tensors(self._model)), directory / "model.safetensors")
        save_file(_contiguous(self._optimizer_tensors()), directory / "optimizer.safetensors")
        save_file(capture_random_state(self._device), directory / "random.safetensors")
        state = {"step": step, "position": position, "model": _description(self._model)}
        (directory / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    def _restore(self, path: Path) -> Resumed:
        if (version := sealed_format(path)) != FORMAT:
            raise CheckpointError(f"{path} has format {version}; allowed: {FORMAT}; use the actmem that wrote it")
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if differences := _differences(state["model"], _description(self._model)):
            raise CheckpointError(
                f"{path} is of another model: {'; '.join(differences)}; set the model back, or start a new run in "
                "another train.output_dir"
            )
        _restore_model(self._model, load_file(path / "model.safetensors"))
        self._restore_optimizer(load_file(path / "optimizer.safetensors"))
        restore_random_state(load_file(path / "random.safetensors"), self._device)
        return Resumed(state["step"], state["position"], path)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self._model.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """By parameter name, since an optimizer numbers its parameters in an order that a later version may change."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            # A copy: what safetensors loads is the file itself, mapped, which would then live as long as the run.
            state.setdefault(numbers[name], {})[field] = value.clone()
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _set_aside(faults: dict[Path, str], used: Path) -> None:
    if not faults:
        return
    for path in faults:
        path.rename(path.with_name(f"damaged-{path.name}"))
    warnings.warn(
        f"resumed from the older {used.name}: {_listed(faults)}; set aside as damaged-… in {used.parent}", stacklevel=2
    )


def _listed(faults: dict[Path, str]) -> str:
    return "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())


def _model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that a state dict would hold; the tensors themselves."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _restore_model(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    for name, tensor in _model_tensors(model).items():
        tensor.copy_(tensors[name])


def _description(model: PreTrainedModel) -> dict[str, Any]:
    fields = json.loads(json.dumps(model.config.to_dict(), default=str))
    fields = {name: value for name, value in fields.items() if name not in _RUN_FIELDS and not name.startswith("_")}
    tensors = _model_tensors(model)
    return {
        "class": type(model).__name__,
        "config": fields,
        "tensors": {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()},
    }


def _differences(saved: dict[str, Any], current: dict[str, Any], limit: int = 6) -> list[str]:
    found = [f"{saved['class']} there, {current['class']} here"] if saved["class"] != current["class"] else []
    for part in ("config", "tensors"):
        there, here = saved[part], current[part]
        found += [
            f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
    return found[:limit] + ([f"and {len(found) - limit} more"] if len(found) > limit else [])
