"""How many layers a model has, before it is built."""

from __future__ import annotations

import json
from pathlib import Path

from actmem.config.presets import PRESETS
from actmem.config.schema import ModelConfig

_FIELD = "num_hidden_layers"
_DEFAULTS = {"qwen3": 32, "qwen3_moe": 24}  # of Hugging Face's configuration classes
_MAX_FILE_BYTES = 2**20


def num_layers(model: ModelConfig) -> int | None:
    """Layers of the preset, of `model.config` or of the config.json in `model.path`; ``None`` where none says it.

    Where a model type alone is given, they are those of its configuration class.
    """
    fields = dict(PRESETS[model.name]) if model.name is not None else _published(model.path) if model.path else {}
    fields |= model.config or {}
    count = fields.get(_FIELD, _DEFAULTS.get(str(fields.get("model_type"))))
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _published(directory: Path) -> dict[str, object]:
    try:
        with (directory / "config.json").open("rb") as file:
            fields = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):  # whoever builds the model says what is wrong with the file
        return {}
    return fields if isinstance(fields, dict) else {}
