"""The run configuration as typed, frozen sections: what may stand in the YAML, and nothing else.

Every section forbids unknown keys and values of another type. Reading a file, with line numbers and all faults at once,
is the work of `actmem.config.loading`; the rules that tie several fields together are in `actmem.config.rules`. A
`RunConfig` built by hand has its fields checked, but not those rules: `parse_config` takes a mapping and checks both.
"""

from __future__ import annotations

import re
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)

from actmem.config.layers import split_layers
from actmem.units import MAX_BYTES, parse_bytes

PresetName = Literal[
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-tiny",
    "qwen3-moe-tiny",
]
PRESET_NAMES: tuple[str, ...] = get_args(PresetName)

Dtype = Literal["float32", "bfloat16"]
PolicyName = Literal["none", "full", "mlp", "selective", "attention-swap", "layer-swap", "torch-full", "torch-sac"]
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]


def _refuse_no_path(value: object) -> object:
    if isinstance(value, str) and (not value or "\0" in value):
        raise ValueError("is not a path")
    return value


def _read_bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, Field(ge=0, lt=MAX_BYTES, json_schema_extra={"format": "bytes"}), BeforeValidator(_read_bytes)]
"""A number of bytes: ``1048576`` or ``"64GiB"``."""


def read_budget(value: object) -> int | float | Literal["auto"]:
    """A budget as a user wrote it: ``"40%"`` and ``0.4`` as a share, text with a unit and whole numbers as bytes.
    Numbers may be NumPy's.

    Raises `ValueError` for what is neither.
    """
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise ValueError("is neither a number of bytes nor a share")
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return "auto"
        read = _read_share(text) if _SHARE.fullmatch(text) else parse_bytes(text)
    else:
        read = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(read, float) and not 0.0 < read <= 1.0:
        raise ValueError("is no share: one lies above 0 and at most at 1; for bytes write a unit, as in '60GiB'")
    if not 0 < read < MAX_BYTES:
        raise ValueError("is not above 0" if read <= 0 else "is more bytes than any device has")
    return read


_SHARE = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)\s*%|[+-]?(\d+\.\d*|\.\d+)", re.ASCII)


def _read_share(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


Budget = Annotated[
    int | float | Literal["auto"],
    PlainValidator(read_budget),
    PlainSerializer(lambda value: value),
    WithJsonSchema({"format": "budget"}),
]
"""A peak of device memory: whole bytes, the share of the layers' activations that may stay, or ``auto`` for what the
device has."""

# Strict pydantic takes no text for a path, and YAML has nothing else.
PathField = Annotated[Path, Field(strict=False), BeforeValidator(_refuse_no_path)]


LAYERS_SCHEMA = {"type": "layers"}

# The list is checked here; its entries, every one of them, by the rules.
Layers = Annotated[tuple[object, ...], BeforeValidator(split_layers), WithJsonSchema(LAYERS_SCHEMA)]
"""Layers as they were written, `"0-3, 8"` split into its entries; `actmem.config.layers.from_ranges` reads them."""

LayersByPattern = dict[str, Layers]
"""A regex over the paths inside a layer -> the layers it speaks of."""

_EXCLUDED_NAMES = TypeAdapter(Annotated[tuple[Text, ...], Field(strict=False)])
_EXCLUDED_PATTERNS = TypeAdapter(LayersByPattern, config=ConfigDict(strict=True))


def _read_excluded(value: object) -> object:
    return (_EXCLUDED_PATTERNS if isinstance(value, dict) else _EXCLUDED_NAMES).validate_python(value)


def _written_excluded(value: object) -> object:
    """As it is: beside a validator of our own, pydantic serializes a union twice and warns of the second time."""
    return value


Excluded = Annotated[
    tuple[str, ...] | LayersByPattern,
    PlainValidator(_read_excluded),
    PlainSerializer(_written_excluded),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "additionalProperties": LAYERS_SCHEMA}),
]
"""Parts of op names, or patterns with layers."""


def _read_no_mode(value: object) -> object:
    return "None" if value is None else value


class Section(BaseModel):
    """A frozen section of the YAML that admits no unknown key and no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The model: a preset `name`, a local Hugging Face directory `path`, or the fields of a Hugging Face `config`.

    `config` may also stand beside `name`, where its fields replace the preset's. `dtype` is that of the parameters.
    """

    name: PresetName | None = None
    path: PathField | None = None
    config: dict[str, object] | None = None
    dtype: Dtype = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    loss: Literal["standard", "chunked"] = "standard"


class DataConfig(Section):
    """The text: files by glob, and how they become sequences of `sequence_length` tokens.

    `tokenizer` is a local directory; without one a byte-level BPE of `vocab_size` entries is trained once on the
    corpus and kept in `cache_dir`. `eval_share` of the documents is held out for evaluation.
    """

    path: Annotated[list[Text], Field(min_length=1)]
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    tokenizer: PathField | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    eval_share: Fraction = 0.05
    cache_dir: PathField = Path(".actmem-cache")


class TrainConfig(Section):
    """The training loop. `lr` warms up linearly over `warmup_steps`, then follows a cosine to `lr * min_lr_share`.

    `eval_every` and `checkpoint_every` count optimizer steps; 0 means never. `device: auto` takes the accelerator
    where there is one.
    """

    steps: Positive = 100
    micro_batch_size: Positive = 1
    grad_accumulation: Positive = 1
    lr: Annotated[float, Field(gt=0.0)] = 3.0e-4
    min_lr_share: Share = 0.1
    warmup_steps: Count = 10
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    # A YAML sequence is a list: the pair itself is lax, its two numbers stay strict.
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(gt=0.0)] | None = 1.0
    autocast: Literal["bfloat16"] | None = None
    seed: Count = 0
    device: Text = "auto"
    eval_every: Count = 0
    eval_batches: Positive = 8
    checkpoint_every: Count = 0
    keep_checkpoints: Positive = 2
    resume: bool = True
    output_dir: PathField = Path("runs/actmem")


class ParallelConfig(Section):
    """How devices share a run, one process each: `world_size` of them.

    `dp_replicate_size` copies of the model, each with data of its own, are each cut into `dp_shard_size` shards, whose
    ranks have data of their own too. `tp_size` ranks share the products of a layer: with `sequence_parallel` also its
    norms and residuals, each a part of the sequence, and with `loss_parallel` the loss, each a part of the vocabulary.
    `ep_size` of the shards' ranks share the experts of each layer.

    `pp_size` ranks share the layers, in stages that `pp_schedule` sets to work on `pp_microbatches` pieces of each
    batch of `train.micro_batch_size` sequences. `pp_layers` are the layers of each stage; ``null`` cuts them evenly.
    A rank that does not answer for `timeout_seconds` ends the run.
    """

    dp_replicate_size: Positive = 1
    dp_shard_size: Positive = 1
    tp_size: Positive = 1
    pp_size: Positive = 1
    ep_size: Positive = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    pp_schedule: ScheduleName = "1F1B"
    pp_microbatches: Positive = 8
    pp_layers: Annotated[list[Positive], Field(min_length=1)] | None = None
    timeout_seconds: Annotated[float, Field(ge=0.1, le=1e6)] = 600.0

    @property
    def world_size(self) -> int:
        """Ranks in all. Those that share experts are among the shards'."""
        return self.dp_replicate_size * self.dp_shard_size * self.tp_size * self.pp_size


class MemoryConfig(Section):
    """Where swapped values go and how the engine guards a plan.

    `tier`: ``host`` is pinned memory beside an accelerator, ``disk`` a temporary file; ``auto`` takes the host where
    there is an accelerator and the disk on the CPU. A full host spills to the disk if `disk_path` is set.
    `host_limit` and `disk_limit` cap them; ``null`` means half of the machine's memory and what the disk has free.
    Storages under `min_swap_bytes` are saved rather than swapped, as is whatever comes while `in_flight_limit` bytes
    are on their way out. `verify` compares hashes of recomputed and reloaded values, in the first step of a shape.
    """

    tier: Literal["auto", "host", "disk"] = "auto"
    host_limit: Bytes | None = None
    disk_path: PathField | None = None
    disk_limit: Bytes | None = None
    min_swap_bytes: Bytes = 2**20
    in_flight_limit: Bytes = 2**33
    verify: Literal["first", "always", "off"] = "first"
    strict_matching: bool = False


class RecomputeConfig(Section):
    """What is made again in the backward pass.

    `full`: whole layers, `full_recompute_layer`. `select`: what the patterns of `select_module` name, each in its
    layers; layers of `full_recompute_layer` are then recomputed whole. Ops whose name holds a text of `exclude_op` are
    saved all the same; patterns with layers may stand there too.
    """

    mode: Annotated[Literal["None", "full", "select"], BeforeValidator(_read_no_mode)] = "None"
    full_recompute_layer: Layers | None = None
    select_module: LayersByPattern | None = None
    exclude_op: Excluded | None = None


class RecomputeCommConfig(Section):
    """Communication ops that are run again in the backward pass, whatever `recompute` says."""

    enable: bool = False
    select_module: LayersByPattern | None = None


class LayerSwapConfig(Section):
    """Layers that are swapped whole, their inputs included."""

    layers: Layers


class OpSwapConfig(Section):
    """Modules or ops that are swapped: what the pattern `op_name` names, in `layers`. The input of a layer is named
    ``input``."""

    op_name: str
    layers: Layers


class SwapConfig(Section):
    """What is moved away from the device until the backward pass. Every entry counts.

    `default_prefetch` is how many layers ahead of the backward pass the way back starts.
    """

    enable: bool = False
    default_prefetch: Positive = 1
    layer_swap: Annotated[tuple[LayerSwapConfig, ...], Field(strict=False)] | None = None
    op_swap: Annotated[tuple[OpSwapConfig, ...], Field(strict=False)] | None = None


class RunConfig(Section):
    """One run. What becomes of its activations is said in one of four ways: by a `memory_budget`, for which the planner
    finds the best plan on `hardware`, by a `policy`, by a `plan` file, or by the sections `activation_swap`,
    `recompute`, `recompute_comm` and `swap`, which combine. `hardware` names a device or a file that `actmem calibrate`
    wrote; ``auto`` is the device of this run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory_budget: Budget | None = None
    hardware: Text = "auto"
    policy: PolicyName | None = None
    plan: PathField | None = None
    activation_swap: Literal["none", "attention"] = "none"
    recompute: RecomputeConfig = RecomputeConfig()
    recompute_comm: RecomputeCommConfig = RecomputeCommConfig()
    swap: SwapConfig = SwapConfig()
    memory: MemoryConfig = MemoryConfig()
    platform: Literal["torch", "mindspore"] = "torch"
    allow_unverified_model: bool = False
