from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from actmem.config.schema import ModelConfig
from actmem.errors import ApplyError
from actmem.models.building import build_model
from actmem.models.regions import find_regions


class OldStyleModel(nn.Module):
    """A model from before GradientCheckpointingLayer: only the class names say what a layer is."""

    _no_split_modules = ("OldStyleLayer", "Embedding")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList([OldStyleLayer(), OldStyleLayer()])


class OldStyleLayer(nn.Module):
    pass


def test_qwen3_layers_in_order() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="qwen3-30b-a3b"), seed=0)
    regions = find_regions(model)
    assert list(regions) == [f"model.layers.{index}" for index in range(48)]
    assert all(layer is model.get_submodule(name) for name, layer in regions.items())


@pytest.mark.parametrize(
    ("model_class", "config", "first", "num_layers"),
    [
        (GPT2LMHeadModel, GPT2Config(n_layer=3), "transformer.h.0", 3),
        (BertForMaskedLM, BertConfig(num_hidden_layers=2), "bert.encoder.layer.0", 2),
        (T5ForConditionalGeneration, T5Config(num_layers=2), "encoder.block.0", 4),
    ],
)
def test_layers_of_other_families(model_class: type[nn.Module], config: object, first: str, num_layers: int) -> None:
    with torch.device("meta"):
        regions = find_regions(model_class(config))  # type: ignore[call-arg]
    assert next(iter(regions)) == first
    assert len(regions) == num_layers


def test_old_style_layers_by_class_name_but_not_the_embedding() -> None:
    assert list(find_regions(OldStyleModel())) == ["blocks.0", "blocks.1"]


def test_a_wrapper_only_prefixes_the_names() -> None:
    assert list(find_regions(nn.ModuleDict({"inner": OldStyleModel()}))) == ["inner.blocks.0", "inner.blocks.1"]


def test_a_model_without_layers_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ApplyError, match=r"Sequential.*regions=\['blocks.0'"):
        find_regions(nn.Sequential(nn.Linear(2, 2)))
