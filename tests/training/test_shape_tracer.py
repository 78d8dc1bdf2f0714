"""A few layers tell of many: what is traced of a short stack is the whole step, to the last number."""

from __future__ import annotations

from typing import Any

import pytest

from actmem.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from actmem.training import shape_tracer
from actmem.training.shape_tracer import ShapeTracer
from actmem.training.traced import trace_step

NUM_LAYERS = 7
MODELS = {
    "dense": ModelConfig(name="qwen3-tiny", config={"num_hidden_layers": NUM_LAYERS}, loss="chunked"),
    "moe": ModelConfig(name="qwen3-moe-tiny", config={"num_hidden_layers": NUM_LAYERS}),
}


def run_of(model: ModelConfig, micro_batch_size: int = 2, sequence_length: int = 64) -> RunConfig:
    data = DataConfig(path=["none"], sequence_length=sequence_length)
    return RunConfig(model=model, data=data, train=TrainConfig(micro_batch_size=micro_batch_size))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each model that is traced."""
    numbers: list[int] = []

    def counted(run: RunConfig, model: Any) -> Any:
        numbers.append(len(model.model.layers))
        return trace_step(run, model)

    monkeypatch.setattr(shape_tracer, "trace_step", counted)
    return numbers


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_a_whole_trace(name: str, traced: list[int]) -> None:
    tracer = ShapeTracer(run_of(MODELS[name]))
    for shape in ((2, 64), (1, 64), (5, 32), (3, 128)):
        assert tracer(*shape) == trace_step(run_of(MODELS[name], *shape))
    assert traced.count(NUM_LAYERS) == 1


def test_a_step_that_runs_other_ops_is_traced_whole(traced: list[int]) -> None:
    model = MODELS["moe"].model_copy(update={"loss": "chunked"})
    tracer = ShapeTracer(run_of(model))
    for shape in ((2, 64), (16, 64), (15, 64)):
        assert tracer(*shape) == trace_step(run_of(model, *shape))
    assert traced.count(NUM_LAYERS) == 2


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"num_hidden_layers": 6, "mlp_only_layers": [0, 3]}])
def test_layers_of_several_kinds_or_few_are_all_traced(config: dict[str, Any], traced: list[int]) -> None:
    model = ModelConfig(name="qwen3-moe-tiny", config=config)
    tracer = ShapeTracer(run_of(model))
    for shape in ((2, 64), (1, 64)):
        assert tracer(*shape) == trace_step(run_of(model, *shape))
    assert traced.count(config["num_hidden_layers"]) == 2
