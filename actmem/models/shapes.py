"""A model's modules and shapes without its numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

from actmem.config.schema import ModelConfig
from actmem.errors import ModelError
from actmem.models.building import build_model

# In every config.json, about the file and not about the model.
_OF_THE_FILE = {"_name_or_path", "architectures", "transformers_version", "dtype", "quantization_config"}


def build_shapes(config: ModelConfig, *, vocab_size: int | None = None) -> PreTrainedModel:
    """The model that `build_model` would give, on the meta device: no weight is made or read. Raises `ModelError`."""
    if config.path is not None:
        config = config.model_copy(update={"path": None, "config": _fields_in(config.path)})
    with torch.device("meta"):
        return build_model(config, vocab_size=vocab_size, seed=0)


def _fields_in(directory: Path) -> dict[str, object]:
    try:
        described = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False).to_diff_dict()
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError) as error:
        source = directory / "config.json"
        raise ModelError(f"{source} is no model configuration: {error}; give a Hugging Face directory") from error
    return {name: value for name, value in described.items() if name not in _OF_THE_FILE}
