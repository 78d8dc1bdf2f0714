"""Plans, bounds and predicted peaks of models that the other tests do not have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.errors import ActmemError
from actmem.graph import Graph
from actmem.hardware import load_hardware
from actmem.measuring.bench import random_batch
from actmem.measuring.peak import measure_peak
from actmem.models.building import build_model
from actmem.planning import Action, Plan, Rule
from actmem.planning.conditions import conditions_on
from actmem.planning.planner import Planner
from actmem.training.loss import next_token_loss
from actmem.training.traced import trace_step

WIDTH = 64
SCALARS = 1024


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = torch.tanh(hidden @ self.weight)
        return hidden


class Skipping(nn.Module):
    """The output of the first block goes round all others, as in a U-Net."""

    def __init__(self, blocks: Sequence[nn.Module], *, multiplies: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.multiplies = multiplies

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = [hidden := block(hidden) for block in self.blocks]
        return hidden + (outputs[0] * outputs[-1] if self.multiplies else outputs[0])


def squares(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    loss = model(batch["features"]).square().mean()
    assert isinstance(loss, Tensor)
    return loss


def regions_of(model: Skipping) -> list[str]:
    return [f"blocks.{index}" for index in range(len(model.blocks))]


def features() -> dict[str, Tensor]:
    return {"features": torch.randn(256, WIDTH)}


def traced(model: Skipping, *, gradients_stand: bool = True) -> tuple[Graph, Planner, dict[str, Tensor]]:
    batch = features()
    graph = actmem.trace(model, batch, loss=squares, regions=regions_of(model))
    hardware = load_hardware("cpu").model_copy(update={"workspace_bytes": 0})
    conditions = conditions_on(hardware, tiers=(), gradients_stand=gradients_stand)
    return graph, Planner(graph, conditions, min_swap_bytes=4096), batch


BASE = {
    "vocab_size": 64,
    "hidden_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 1}
LANGUAGE_MODELS = {
    "batched experts under autocast": (
        ModelConfig(config=BASE | EXPERTS | {"num_hidden_layers": 1}, experts_implementation="batched_mm"),
        16,
        True,
    ),
    "eager attention in bfloat16": (
        ModelConfig(
            config=BASE
            | {
                "model_type": "qwen3",
                "hidden_size": 200,
                "num_hidden_layers": 2,
                "num_attention_heads": 12,
                "num_key_value_heads": 3,
                "vocab_size": 257,
                "intermediate_size": 64,
            },
            dtype="bfloat16",
            attn_implementation="eager",
            loss="chunked",
        ),
        16,
        False,
    ),
}


@pytest.mark.parametrize(("model_config", "length", "casts"), LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS.keys())
def test_budgets_of_the_three_line_way_hold_on_the_cpu(model_config: ModelConfig, length: int, casts: bool) -> None:
    run = RunConfig(
        model=model_config,
        data=DataConfig(path=["none"], sequence_length=length),
        train=TrainConfig(micro_batch_size=2, device="cpu", autocast="bfloat16" if casts else None),
        memory=MemoryConfig(verify="off"),
    )
    graph = trace_step(run)[0]
    assert graph.step is not None
    model = build_model(model_config, seed=0)
    batch = random_batch(model, 2, length)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=model_config.loss).total()
        loss.backward()

    over = []
    for share in ("100%", "99%"):
        planned = actmem.plan(graph, share, "cpu", gradients_stand=True)
        budget = planned.budget_bytes
        with actmem.apply(model, planned, memory={"verify": "off"}):
            step()
            step()
            measured = measure_peak(step, model.device).peak_bytes + graph.step.standing.total
        over += [(budget, measured, f"{measured / budget - 1:+.1%}")] if measured > budget else []
    assert not over


def test_a_saved_plan_for_a_budget_is_refused_by_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Skipping([Block(), Block()], multiplies=False), Skipping([Twice()] * 1, multiplies=False)
    batch = features()
    graph = actmem.trace(model, batch, loss=squares, regions=regions_of(model))
    planned = actmem.plan(graph, "99%", "cpu")
    assert planned.plan.rules
    planned.plan.save(tmp_path / "plan.yaml")
    with pytest.raises(ActmemError), actmem.apply(other, tmp_path / "plan.yaml", regions=regions_of(other)):
        squares(other, batch).backward()


@pytest.mark.parametrize("budget", ["9" * 400, "9" * 400 + "GiB", 10**400], ids=["digits", "GiB", "int"])
def test_an_enormous_budget_is_answered(budget: str | int) -> None:
    model = Skipping([Block(), Block()], multiplies=False)
    graph = actmem.trace(model, features(), loss=squares, regions=regions_of(model))
    try:
        assert actmem.plan(graph, budget, "cpu").plan.rules == ()
    except ActmemError as error:
        assert "memory_budget" in str(error)


@pytest.mark.parametrize("arguments", [{"tiers": ("tape",)}, {"tiers": "disk"}, {"level": "huge"}, {"hardware": None}])
def test_arguments_of_plan_that_are_none_are_told(arguments: dict[str, object]) -> None:
    model = Skipping([Block(), Block()], multiplies=False)
    graph = actmem.trace(model, features(), loss=squares, regions=regions_of(model))
    with pytest.raises(ActmemError):
        actmem.plan(graph, "99%", **{"hardware": "cpu", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layers": {}'], ids=["empty", "no keys", "list", "cut short"])
def test_a_file_that_is_no_graph_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ActmemError, match="graph"):
        Graph.load(path)


@pytest.mark.parametrize(
    "loss",
    [lambda model, batch: model(batch["features"]), lambda model, batch: None, lambda m, b: squares(m, b).detach()],
    ids=["not a scalar", "nothing", "no gradient"],
)
def test_a_loss_that_has_no_gradient_is_told(loss: object) -> None:
    model = Skipping([Block(), Block()], multiplies=False)
    with pytest.raises(ActmemError, match="loss"):
        actmem.trace(model, features(), loss=loss, regions=regions_of(model))  # type: ignore[arg-type]


WRITING = """
import resource, signal, sys
from actmem.planning import Action, Plan, Rule
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
Plan("new", tuple(Rule("op%d" % i, Action.RECOMPUTE) for i in range(50))).save(sys.argv[1])
"""


def test_a_write_that_fails_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan("old", (Rule(".*", Action.RECOMPUTE),)).save(path)
    before = path.read_text()
    assert subprocess.run([sys.executable, "-c", WRITING, str(path)], capture_output=True, check=False).returncode
    assert path.read_text() == before
