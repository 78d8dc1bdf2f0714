from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from actmem.config.schema import ModelConfig
from actmem.errors import ModelError
from actmem.models.building import build_model

SHAPE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
DENSE: dict[str, object] = SHAPE | {"model_type": "qwen3"}
MOE: dict[str, object] = SHAPE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build_model(ModelConfig(config=DENSE), seed=7).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("fields", [DENSE, MOE], ids=["dense", "moe"])
def test_seed_alone_decides_the_parameters(fields: dict[str, object]) -> None:
    first, again, other = (build_model(ModelConfig(config=fields), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(ModelConfig(config=DENSE), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_reach_the_model() -> None:
    config = ModelConfig(config=MOE, dtype="bfloat16", attn_implementation="eager", experts_implementation="eager")
    model = build_model(config, seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert not model.config.use_cache
    assert model.training


def test_moe_adds_the_auxiliary_loss_and_a_zero_coefficient_turns_it_off() -> None:
    tokens = torch.arange(32).reshape(1, 32)
    assert build_model(ModelConfig(config=MOE), seed=0)(input_ids=tokens).aux_loss > 0
    without = build_model(ModelConfig(config=MOE | {"router_aux_loss_coef": 0.0}), seed=0)
    assert without(input_ids=tokens).aux_loss is None


def test_vocabulary_replaces_the_presets_and_drops_token_ids_outside_it() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="qwen3-0.6b"), vocab_size=1000, seed=0)
    assert model.get_input_embeddings().weight.shape == (1000, 1024)
    assert model.config.eos_token_id is None


def test_fields_beside_a_preset_replace_its_own() -> None:
    model = build_model(ModelConfig(name="qwen3-tiny", config={"num_hidden_layers": 1}), seed=0)
    assert model.config.num_hidden_layers == 1
    assert model.config.hidden_size == 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model_type is None; allowed: qwen3, qwen3_moe"),
        ({"model_type": "llama"}, "model_type is 'llama'; allowed: qwen3, qwen3_moe"),
        (DENSE | {"hiden_size": 3, "num_layer": 2}, "'hiden_size' \\(did you mean 'hidden_size'\\?\\); 'num_layer'"),
        (DENSE | {"hidden_size": "wide"}, "hidden_size"),
        (DENSE | {"hidden_size": -64}, "negative"),
        (DENSE | {"hidden_act": "slu"}, "slu"),
        (DENSE | {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (DENSE | {"head_dim": 15}, "head_dim.*15"),
        (MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of num_experts 4"),
    ],
)
def test_fields_that_make_no_model(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(ModelConfig(config=fields), seed=0)


def test_a_vocabulary_named_in_the_configuration_must_hold_the_tokenizers() -> None:
    with pytest.raises(
        ModelError, match=r"vocabulary of 320 is smaller than the tokenizer's 400; allowed: 400 or more"
    ):
        build_model(ModelConfig(config=DENSE), vocab_size=400, seed=0)


@pytest.mark.parametrize("fields", [DENSE, MOE], ids=["dense", "moe"])
def test_a_saved_model_loads_as_it_was(fields: dict[str, object], tmp_path: Path) -> None:
    model = build_model(ModelConfig(config=fields), seed=7)
    model.save_pretrained(tmp_path)
    loaded = build_model(ModelConfig(path=tmp_path), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert not loaded.config.use_cache
    assert loaded.training


def test_loading_honours_the_dtype(saved: Path) -> None:
    assert build_model(ModelConfig(path=saved, dtype="bfloat16"), seed=0).dtype == torch.bfloat16


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        build_model(ModelConfig(path=tmp_path / "nowhere"), seed=0)


def test_a_directory_without_a_configuration(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        build_model(ModelConfig(path=saved), seed=0)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_configuration_that_is_none(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ModelError, match="is no model configuration"):
        build_model(ModelConfig(path=saved), seed=0)


def test_a_configuration_with_a_field_of_another_type(saved: Path) -> None:
    fields = json.loads((saved / "config.json").read_text()) | {"hidden_size": "wide"}
    (saved / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="hidden_size"):
        build_model(ModelConfig(path=saved), seed=0)


def test_another_architecture(tmp_path: Path) -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    )
    llama.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"'llama' model; allowed: qwen3, qwen3_moe"):
        build_model(ModelConfig(path=tmp_path), seed=0)


def test_pickled_weights_are_refused(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors; .* can run code"):
        build_model(ModelConfig(path=saved), seed=0)


def test_truncated_weights(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        build_model(ModelConfig(path=saved), seed=0)


def test_a_lost_shard(tmp_path: Path) -> None:
    build_model(ModelConfig(config=DENSE), seed=7).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        build_model(ModelConfig(path=tmp_path), seed=0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"),
            "missing: model.layers.0.mlp.up_proj.weight",
        ),
        (lambda weights: weights.update({"model.extra": torch.zeros(2)}), "unexpected: model.extra"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(2)}),
            r"another shape: model.norm.weight \[2\] for",
        ),
    ],
    ids=["missing", "unexpected", "of another shape"],
)
def test_weights_that_do_not_fit_the_configuration(saved: Path, edit: object, message: str) -> None:
    weights = load_file(saved / "model.safetensors")
    edit(weights)  # type: ignore[operator]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        build_model(ModelConfig(path=saved), seed=0)


def test_a_whole_number_stands_for_a_fraction() -> None:
    model = build_model(ModelConfig(config=MOE | {"attention_dropout": 0, "router_aux_loss_coef": 0}), seed=0)
    assert (model.config.attention_dropout, model.config.router_aux_loss_coef) == (0.0, 0.0)
    with pytest.raises(ModelError, match="attention_dropout"):
        build_model(ModelConfig(config=MOE | {"attention_dropout": True}), seed=0)
