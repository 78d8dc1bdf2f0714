"""The rules that tie fields together, or a field to the disk; and the settings that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from actmem.config.complaint import Complaint, Rule
from actmem.config.idle_sections import idle_sections
from actmem.config.parallel_rules import PARALLEL_RULES
from actmem.config.schema import RunConfig
from actmem.config.section_rules import SECTION_RULES
from actmem.errors import Fault


def _some_model(config: RunConfig) -> Iterator[Complaint]:
    model = config.model
    if model.name is None and model.path is None and model.config is None:
        allowed = "one of name (a preset), path (a directory) and config (fields)"
        yield Complaint("model", "names no model", allowed=allowed)


def _name_or_path(config: RunConfig) -> Iterator[Complaint]:
    model = config.model
    if model.name is not None and model.path is not None:
        problem = f"is given beside model.name: {model.name}; each names a model"
        yield Complaint("model.path", problem, model.path, "one of model.name and model.path")


def _path_or_config(config: RunConfig) -> Iterator[Complaint]:
    model = config.model
    if model.path is not None and model.config is not None:
        problem = "is given beside model.path, whose directory has a config of its own"
        yield Complaint("model.config", problem, model.config, "model.config alone or beside model.name")


def _warmup_within_steps(config: RunConfig) -> Iterator[Complaint]:
    train = config.train
    if "warmup_steps" in train.model_fields_set and train.warmup_steps > train.steps:
        problem = f"{train.warmup_steps} warm-up steps are more than the {train.steps} steps of train.steps"
        allowed = (
            f"at most {train.steps}, or more train.steps; add train.warmup_steps={train.steps // 10} to the command"
        )
        yield Complaint("train.warmup_steps", problem, train.warmup_steps, allowed)


def _model_directory(config: RunConfig) -> Iterator[Complaint]:
    yield from _directory("model.path", config.model.path)


def _tokenizer_directory(config: RunConfig) -> Iterator[Complaint]:
    yield from _directory("data.tokenizer", config.data.tokenizer)


def _swap_directory(config: RunConfig) -> Iterator[Complaint]:
    yield from _directory("memory.disk_path", config.memory.disk_path)


def _plan_file(config: RunConfig) -> Iterator[Complaint]:
    plan = config.plan
    if plan is not None and not _holds(plan, Path.is_file):
        problem = "is a directory" if _holds(plan, Path.is_dir) else "does not exist"
        yield Complaint("plan", f"{str(plan)!r} {problem}", plan, "a plan file, seen from the working directory")


def _directory(field: str, path: Path | None) -> Iterator[Complaint]:
    if path is not None and not _holds(path, Path.is_dir):
        problem = "is not a directory" if _holds(path, Path.exists) else "does not exist"
        yield Complaint(field, f"{str(path)!r} {problem}", path, "a directory, seen from the working directory")


def _holds(path: Path, test: Callable[[Path], bool]) -> bool:
    """Whether the disk says yes; a name too long for it, or a place we may not look into, counts as a no."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


RULES = (
    Rule(("model.name", "model.path", "model.config"), _some_model),
    Rule(("model.name", "model.path"), _name_or_path),
    Rule(("model.path", "model.config"), _path_or_config),
    Rule(("train.steps", "train.warmup_steps"), _warmup_within_steps),
    Rule(("model.path",), _model_directory),
    Rule(("data.tokenizer",), _tokenizer_directory),
    Rule(("memory.disk_path",), _swap_directory),
    Rule(("plan",), _plan_file),
    *SECTION_RULES,
    *PARALLEL_RULES,
)


def idle_settings(config: RunConfig) -> tuple[Fault, ...]:
    """Warnings: settings of a sound configuration that have no effect, or less than they seem to have.

    They are `Fault`s without a line. Nothing stops a run that has them.
    """
    train, data = config.train, config.data
    found = list(idle_sections(config))
    if train.warmup_steps > train.steps:
        problem = f"the default of {train.warmup_steps} outlasts the {train.steps} steps; lr never reaches train.lr"
        found.append(Fault("train.warmup_steps", problem, train.warmup_steps, f"at most {train.steps}"))
    if "hardware" in config.model_fields_set and config.memory_budget is None:
        problem = "has no effect while there is no memory_budget"
        found.append(Fault("hardware", problem, config.hardware))
    if "vocab_size" in data.model_fields_set and data.tokenizer is not None:
        found.append(Fault("data.vocab_size", "has no effect beside data.tokenizer", data.vocab_size))
    if "eval_batches" in train.model_fields_set and not train.eval_every:
        found.append(Fault("train.eval_batches", "has no effect while train.eval_every is 0", train.eval_batches))
    if "keep_checkpoints" in train.model_fields_set and not train.checkpoint_every:
        problem = "has no effect while train.checkpoint_every is 0"
        found.append(Fault("train.keep_checkpoints", problem, train.keep_checkpoints))
    return tuple(found)
