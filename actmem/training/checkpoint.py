"""Everything a run needs to go on as if it had never stopped, in one sealed directory a step.

    step-00000100/
      model.safetensors       parameters and persistent buffers, by name; tied parameters once
      optimizer.safetensors   its state tensors, as <parameter name>/<key>
      random.safetensors      the random generators
      state.json              step, place in the data, and a description of the model
      manifest.json           size and SHA-256 of each file, format version

A run of several ranks writes the same tensors as `shard-….safetensors`, random generators under each rank's number.
Either is read under any layout. No file is a pickle, so reading one runs no code.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from actmem.errors import CheckpointError
from actmem.parallel.world import World
from actmem.training.random_state import capture_random_state, restore_random_state
from actmem.training.sealed_directory import (
    damage,
    remove_directory,
    remove_partial,
    seal,
    sealed_format,
    writing_directory,
)
from actmem.training.sharded_files import load_shards, names_in, save_shards

FORMAT = 1
SHARDED_FORMAT = 2
Position = dict[str, int | str]
_RANDOM = "random/"
# Fields of a Hugging Face configuration that may change between two runs of one model.
_RUN_FIELDS = {"transformers_version", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}


@dataclass(frozen=True)
class Resumed:
    """Where a restored run stands: optimizer steps done, the place in the data, and the checkpoint they came from."""

    step: int
    position: Position
    path: Path


class Checkpoints:
    """The checkpoints of one run: `save` writes one, `resume` restores from the newest that is intact.

    `models` are the whole model or this rank's stages of it, and `description` is what `describe` said of the whole.
    All ranks of a run call its methods together.
    """

    def __init__(
        self,
        root: Path,
        models: Sequence[PreTrainedModel],
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
        world: World,
        description: dict[str, Any],
    ) -> None:
        self.root = root
        self._models = models
        self._optimizer = optimizer
        self._keep = keep
        self._world = world
        self._device = world.device
        self._description = description

    def steps(self) -> list[Path]:
        """The directories of finished checkpoints, oldest first, whether intact or not."""
        return sorted(self.root.glob("step-*[0-9]"))

    def save(self, step: int, position: Position) -> Path:
        """Write the checkpoint of `step`, then remove all but the newest `keep`.

        Raises `CheckpointError` where it cannot be written; the older ones are then all still there.
        """
        target = self.root / f"step-{step:08d}"
        fault: BaseException | None = None
        try:
            if self._world.size == 1:
                self._save_alone(target, step, position)
            else:
                self._save_together(target, step, position)
        except (OSError, SafetensorError, CheckpointException) as error:
            fault = error
        said = self._world.gather(None if fault is None else str(fault))
        if any(each is not None for each in said):
            told = next(each for each in said if each is not None)
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {target}: {told}; the earlier ones are intact; "
                "free space or set another train.output_dir, and start the run again"
            ) from fault
        return target

    def _save_alone(self, target: Path, step: int, position: Position) -> None:
        with writing_directory(target) as directory:
            save_file(_contiguous(self._model_tensors()), directory / "model.safetensors")
            save_file(_contiguous(self._optimizer_tensors()), directory / "optimizer.safetensors")
            save_file(capture_random_state(self._device), directory / "random.safetensors")
            self._seal(directory, step, position, FORMAT)
        self._remove_old()

    def _save_together(self, target: Path, step: int, position: Position) -> None:
        """The first rank makes the directory, all write, the first one seals it."""
        with ExitStack() as stack:
            directory = self._world.tell(_entered(stack, target) if self._world.is_first else None)
            if isinstance(directory, OSError):
                raise directory
            save_shards(self._all_tensors(self._world.rank), directory)
            if self._world.is_first:
                self._seal(directory, step, position, SHARDED_FORMAT)
        if self._world.is_first:
            self._remove_old()

    def _seal(self, directory: Path, step: int, position: Position, version: int) -> None:
        state = {"step": step, "position": position, "model": self._description, "ranks": self._world.size}
        (directory / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        seal(directory, version)

    def _remove_old(self) -> None:
        for old in self.steps()[: -self._keep]:
            remove_directory(old)

    def resume(self) -> Resumed | None:
        """Restore model, optimizer and random state from the newest intact checkpoint; `None` where there is none.

        A damaged one is set aside as `damaged-step-…` and named in a warning. Raises `CheckpointError` where all are
        damaged, and for one of another model or format: a run never silently starts over.
        """
        found = self._world.tell(self._find_intact() if self._world.is_first else None)
        if found.path is None:
            if found.faults:
                raise CheckpointError(
                    f"no checkpoint in {self.root} is intact ({_listed(found.faults)}); put an intact copy there, or "
                    "remove them to start over"
                )
            return None
        resumed = self._restore(found.path)
        if self._world.is_first:
            _set_aside(found.faults, found.path)
        return resumed

    def _find_intact(self) -> _Found:
        remove_partial(self.root)
        faults: dict[Path, str] = {}
        for path in reversed(self.steps()):
            fault = damage(path)
            if fault is None:
                return _Found(path, faults)
            faults[path] = fault
        return _Found(None, faults)

    def _restore(self, path: Path) -> Resumed:
        if (version := sealed_format(path)) not in (FORMAT, SHARDED_FORMAT):
            raise CheckpointError(
                f"{path} has format {version}; allowed: {FORMAT}, {SHARDED_FORMAT}; use the actmem that wrote it"
            )
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if differences := _differences(state["model"], self._description):
            raise CheckpointError(
                f"{path} is of another model: {'; '.join(differences)}; set the model back, or start a new run in "
                "another train.output_dir"
            )
        if version == FORMAT and self._world.size == 1:
            self._restore_alone(path)
        else:
            self._restore_together(path, of_this_layout=state.get("ranks", 1) == self._world.size)
        return Resumed(state["step"], state["position"], path)

    def _restore_alone(self, path: Path) -> None:
        loaded = load_file(path / "model.safetensors")
        for name, tensor in self._model_tensors().items():
            tensor.copy_(loaded[name])
        self._restore_optimizer(load_file(path / "optimizer.safetensors"))
        restore_random_state(load_file(path / "random.safetensors"), self._device)

    def _restore_together(self, path: Path, *, of_this_layout: bool) -> None:
        """Under another number of ranks than it was written, random generators stay as they were seeded."""
        self._make_optimizer_state()
        wanted = self._all_tensors(self._world.rank)
        if not of_this_layout:
            wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(_RANDOM)}
        there = names_in(path)
        wanted = {name: tensor for name, tensor in wanted.items() if name in there}
        missing = [name for name in self._model_tensors() if name not in there]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing[:3])}; put an intact copy there")
        load_shards(wanted, path, alone=self._world.size == 1)
        own = f"{_RANDOM}{self._world.rank}/"
        state = {name.removeprefix(own): tensor for name, tensor in wanted.items() if name.startswith(own)}
        if state:
            restore_random_state(state, self._device)

    def _all_tensors(self, rank: int) -> dict[str, Tensor]:
        """This rank's, by the names that they have in sharded files."""
        random = capture_random_state(self._device)
        return (
            self._model_tensors()
            | self._optimizer_tensors()
            | {f"{_RANDOM}{rank}/{name}": tensor for name, tensor in random.items()}
        )

    def _model_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for model in self._models for name, tensor in tensors_of(model).items()}

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: each for model in self._models for name, each in model.named_parameters()}

    def _make_optimizer_state(self) -> None:
        """Zeros for AdamW's state, to read into: it makes its own only in its first step."""
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                zeros = {name: torch.zeros_like(each, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[each] = {"step": torch.zeros((), device=each.device), **zeros}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self._named_parameters().items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """By parameter name, since an optimizer numbers its parameters in an order that a later version may change."""
        names = {parameter: name for name, parameter in self._named_parameters().items()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            # A copy: what safetensors loads is the file itself, mapped, which would then live as long as the run.
            state.setdefault(numbers[name], {})[field] = value.clone()
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


@dataclass(frozen=True)
class _Found:
    """The newest intact checkpoint, and what is wrong with those that are newer."""

    path: Path | None
    faults: dict[Path, str]


def _entered(stack: ExitStack, target: Path) -> Path | OSError:
    """The directory to write to; where there is none, all ranks are to hear why, and none to wait for it."""
    try:
        return stack.enter_context(writing_directory(target))
    except OSError as error:
        return error


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


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that a state dict would hold; the tensors themselves."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """What tells one model from another, to be compared when a run goes on."""
    fields = json.loads(json.dumps(model.config.to_dict(), default=str))
    fields = {name: value for name, value in fields.items() if name not in _RUN_FIELDS and not name.startswith("_")}
    tensors = tensors_of(model)
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
