"""The run configuration as typed, frozen sections: what may stand in the YAML, and nothing else.

Every section forbids unknown keys. Reading a file, with line numbers and all faults at once, is `loading`'s work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
PolicyName = Literal["none", "full", "mlp", "selective", "torch-full", "torch-sac"]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A frozen section of the YAML that admits no unknown key and no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Section):
    """The model: a preset `name`, a local Hugging Face directory `path`, or the fields of a Hugging Face `config`.

    `config` may also stand beside `name`, where its fields replace the preset's. `dtype` is that of the parameters.
    """

    name: str | None = None
    path: Path | None = None
    config: dict[str, object] | None = None
    dtype: Dtype = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    loss: Literal["standard", "chunked"] = "standard"


class DataConfig(Section):
    """The text: files by glob, and how they become sequences of tokens.

    `tokenizer` is a local directory; without one a byte-level BPE of `vocab_size` entries is trained once on the
    corpus and kept in `cache_dir`. `eval_share` of the documents is held out for evaluation.
    """

    path: list[str]
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    tokenizer: Path | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    eval_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    cache_dir: Path = Path(".actmem-cache")


class TrainConfig(Section):
    """The training loop. `lr` warms up linearly over `warmup_steps`, then follows a cosine to `lr * min_lr_share`."""

    steps: Positive = 100
    micro_batch_size: Positive = 1
    grad_accumulation: Positive = 1
    lr: Annotated[float, Field(gt=0.0)] = 3.0e-4
    min_lr_share: Share = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(gt=0.0)] | None = 1.0
    autocast: Literal["bfloat16"] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "auto"
    eval_every: Annotated[int, Field(ge=0)] = 0
    eval_batches: Positive = 8
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    keep_checkpoints: Positive = 2
    resume: bool = True
    output_dir: Path = Path("runs/actmem")


class MemoryConfig(Section):
    """How the engine guards a plan: `verify` compares hashes of recomputed values, in the first step of a shape."""

    verify: Literal["first", "always", "off"] = "first"
    strict_matching: bool = False


class RunConfig(Section):
    """One run. `policy` and `plan` are two ways to say the same thing: at most one of them."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    policy: PolicyName | None = None
    plan: Path | None = None
    memory: MemoryConfig = MemoryConfig()
