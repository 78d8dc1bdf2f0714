from __future__ import annotations

import pytest
import torch

from actmem.config.presets import PRESETS
from actmem.config.schema import PRESET_NAMES, ModelConfig
from actmem.models.building import build_model

# As on the models' cards, in thousands of millions; tied embeddings count once.
PUBLISHED_PARAMETERS = {
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), seed=0)
    assert model.num_parameters() / 1e9 == pytest.approx(PUBLISHED_PARAMETERS[name], abs=0.006)


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_tiny_preset_is_a_few_million_parameters(name: str) -> None:
    assert 2e6 < build_model(ModelConfig(name=name), seed=0).num_parameters() < 10e6


def test_the_configuration_allows_exactly_the_presets_there_are() -> None:
    assert tuple(PRESETS) == PRESET_NAMES


def test_presets_cannot_be_edited() -> None:
    with pytest.raises(TypeError):
        PRESETS["qwen3-8b"]["hidden_size"] = 1  # type: ignore[index]
