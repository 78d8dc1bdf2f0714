"""A corpus that every Python installation has, and runs small enough to be done in a second."""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from actmem.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig

STDLIB = Path(sysconfig.get_path("stdlib"))
CORPUS = [str(STDLIB / "json" / "*.py"), str(STDLIB / "html" / "*.py")]
SHAPE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FIELDS: dict[str, dict[str, object]] = {
    "dense": SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "moe": SHAPE | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trained tokenizer for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def data(cache_dir: Path) -> DataConfig:
    return DataConfig(path=CORPUS, sequence_length=32, vocab_size=400, eval_share=0.2, cache_dir=cache_dir)


@pytest.fixture
def make_config(data: DataConfig, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of a tiny model; `family` is dense or moe, `out` its directory, other keywords are `train` settings."""

    def make(
        family: str = "dense", *, out: str = "run", policy: str | None = None, loss: str = "standard", **train: object
    ) -> RunConfig:
        settings = {"steps": 6, "micro_batch_size": 2, "warmup_steps": 2, "lr": 1e-2, "device": "cpu"} | train
        return RunConfig(
            model=ModelConfig(config=FIELDS[family], loss=loss),
            data=data,
            train=TrainConfig(output_dir=tmp_path / out, **settings),
            policy=policy,
        )

    return make


@pytest.fixture
def signal_in_step() -> Callable[[signal.Signals, int], AbstractContextManager[None]]:
    """`with signal_in_step(SIGINT, 3):` sends this process the signal in the middle of its third forward pass."""
    return send_signal_in_forward


@contextmanager
def send_signal_in_forward(number: signal.Signals, forward: int) -> Iterator[None]:
    calls = 0

    def count(module: nn.Module, _arguments: object) -> None:
        nonlocal calls
        if type(module).__name__ in ("Qwen3Model", "Qwen3MoeModel"):
            calls += 1
            if calls == forward:
                os.kill(os.getpid(), number)

    handle = register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()
