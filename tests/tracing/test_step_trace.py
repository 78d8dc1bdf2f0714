"""The trace of a whole step: what it leaves as it was, what it writes and reads, what it knows of the step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actmem.config.schema import ModelConfig
from actmem.errors import ApplyError
from actmem.graph import Graph
from actmem.models.building import build_model
from actmem.models.shapes import build_shapes
from actmem.tracing import trace
from actmem.tracing.trace import Loss

SHAPE: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DENSE = SHAPE | {"model_type": "qwen3"}
MOE = SHAPE | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "dense": ModelConfig(config=DENSE),
    "eager": ModelConfig(config=DENSE, attn_implementation="eager"),
    "moe": ModelConfig(config=MOE),
    "two kinds": ModelConfig(config=MOE | {"mlp_only_layers": [1]}),
}


def tokens(device: str = "cpu") -> dict[str, object]:
    numbers = torch.zeros(2, 8, dtype=torch.int64, device=device)
    return {"input_ids": numbers, "labels": numbers, "use_cache": False}


def real_model(fields: dict[str, object] = DENSE) -> PreTrainedModel:
    return build_model(ModelConfig(config=fields), seed=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_graph_can_be_written_and_read(config: ModelConfig, tmp_path: Path) -> None:
    graph = trace(build_shapes(config), tokens("meta"))
    assert graph.step is not None
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph


def test_a_step_knows_what_stands_and_what_each_gap_does() -> None:
    model = build_shapes(CONFIGS["dense"])
    step = trace(model, tokens("meta")).step
    assert step is not None
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    assert (step.standing.parameters, step.standing.gradients) == (parameters, parameters)
    assert step.num_tokens == 16
    assert (len(step.calls), len(step.gaps)) == (3, 4)
    assert "embedding" in {op.name for op in step.gaps[0].forward}
    assert "nll_loss_forward" in {op.name for op in step.gaps[-1].forward}
    assert "embedding_dense_backward" in {op.name for op in step.gaps[0].backward}


def test_layers_of_equal_structure_share_a_kind() -> None:
    graph = trace(build_shapes(CONFIGS["two kinds"]), tokens("meta"))
    assert list(graph.layers.values()) == ["Qwen3MoeDecoderLayer", "Qwen3MoeDecoderLayer#1", "Qwen3MoeDecoderLayer"]
    assert all(kind.backward for kind in graph.kinds.values())


def test_each_gradient_is_made_once() -> None:
    step, kinds = (graph := trace(build_shapes(CONFIGS["dense"]), tokens("meta"))).step, graph.kinds
    assert step is not None
    in_layers = sum(op.gradient_bytes for kind in graph.layers.values() for op in kinds[kind].backward)
    outside = sum(op.gradient_bytes for gap in step.gaps for op in gap.backward)
    assert in_layers + outside == step.standing.gradients


def test_a_gradient_is_added_when_all_of_its_node_is_done() -> None:
    kind = next(iter(trace(build_shapes(CONFIGS["moe"]), tokens("meta")).kinds.values()))
    assert sum(op.accumulated_bytes for op in kind.backward) == sum(op.gradient_bytes for op in kind.backward)
    products = [index for index, op in enumerate(kind.backward) if op.name == "_grouped_mm"]
    assert len(products) == 4
    for weight, states in zip(products[::2], products[1::2], strict=True):
        size = kind.backward[weight].gradient_bytes
        assert size > 0
        assert not any(op.accumulated_bytes for op in kind.backward[weight : states + 1])
        assert kind.backward[states + 1].accumulated_bytes == size


def test_all_that_autograd_saves_is_picked_up_and_let_go() -> None:
    for region in trace(build_shapes(CONFIGS["moe"]), tokens("meta")).kinds.values():
        everything = list(range(len(region.packed)))
        assert sorted(each for op in region.backward for each in op.unpacks) == everything
        assert sorted(each for op in region.backward for each in op.releases) == everything


def test_a_mask_that_no_backward_formula_reads_is_a_constant_of_all_layers() -> None:
    step = trace(build_shapes(CONFIGS["eager"]), tokens("meta")).step
    assert step is not None
    masks = [each.number for each in step.constants if not each.backward]
    assert masks
    assert all(masks[0] in dict(call.constants).values() for call in step.calls)


def test_autocast_ends_with_the_forward_pass() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace(build_shapes(CONFIGS["dense"]), tokens("meta"))
        assert torch.is_autocast_enabled("cpu")
    (region,) = graph.kinds.values()
    cast = {region.values[value].storage for op in region.ops if op.name == "_to_copy" for value in op.outputs}
    assert graph.step is not None
    ends = {escape.gap for call in graph.step.calls for escape in call.escapes if escape.storage in cast}
    assert ends == {len(graph.layers)}, "cast weights outlive the layers, and are gone before any backward pass of them"


def test_a_model_with_weights_stays_as_it_was() -> None:
    model = real_model(DENSE | {"attention_dropout": 0.5}).train()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    gradient, state = first.grad, torch.get_rng_state()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trace(model, tokens())
    assert first.grad is gradient and bool((gradient == 1).all())
    assert all(each.grad is None for each in model.parameters() if each is not first)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out = self.norm(features)
        assert isinstance(out, torch.Tensor)
        return out


def test_buffers_that_a_forward_pass_edits_stay_as_they_were() -> None:
    model = Counting()
    trace(model, {"features": torch.randn(8, 4)}, regions=["norm"])
    assert int(model.norm.num_batches_tracked or 0) == 0
    assert model.norm.running_mean is not None and not model.norm.running_mean.any()


def dense_loss(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    loss = model(**batch).loss
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model(**batch).logits,
        lambda model, batch: None,
        lambda model, batch: model(**batch) and None,
        lambda model, batch: dense_loss(model, batch).detach(),
        lambda model, batch: dense_loss(model, batch).item(),
    ],
    ids=["not a scalar", "no run", "nothing", "no gradient", "no tensor"],
)
def test_a_loss_that_has_no_gradient_is_told(loss: Loss) -> None:
    with pytest.raises(ApplyError, match="the loss"):
        trace(real_model(), tokens(), loss=loss)


def test_a_model_that_gives_no_tensor_has_to_say_its_loss() -> None:
    class Naming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, features: Tensor) -> dict[str, Tensor]:
            return {"hidden": self.layers[0](features)}

    with pytest.raises(ApplyError, match="loss="):
        trace(Naming(), {"features": torch.ones(1, 2)}, regions=["layers.0"])


class Skipping(nn.Module):
    """The output of the first layer is added to that of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = [features := torch.tanh(layer(features)) for layer in self.layers]
        return outputs[0] + outputs[-1]


def test_layers_whose_backward_pass_needs_memory_at_other_moments_are_of_another_kind() -> None:
    graph = trace(Skipping(), {"features": torch.randn(8, 4)}, regions=[f"layers.{index}" for index in range(4)])
    kinds = list(graph.layers.values())
    assert kinds[3] == kinds[2] != kinds[1], (
        "the gradient of the first layer's output comes to be while the second runs"
    )
    plain, adding = (graph.kinds[kinds[layer]] for layer in (2, 1))
    assert plain.ops == adding.ops and plain.backward != adding.backward


FROZEN = {
    "the first layer": ["layers.0."],
    "embedding and first layer": ["embed_tokens", "layers.0."],
    "all but the last layer": ["embed_tokens", "layers.0.", "layers.1.", "norm", "lm_head"],
    "all but some products": ["embed_tokens", "mlp", "k_proj", "v_proj", "o_proj", "norm", "lm_head"],
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN.keys())
@pytest.mark.parametrize("shapes", [True, False], ids=["shapes", "numbers"])
def test_layers_of_which_parts_are_frozen_are_told_apart(frozen: list[str], shapes: bool) -> None:
    model = build_shapes(CONFIGS["dense"]) if shapes else real_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    graph = trace(model, tokens("meta" if shapes else "cpu"))
    packed = [len(graph.of_layer(name).packed) for name in graph.layers]
    expected = []
    real = real_model()
    for name, parameter in real.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    for layer in real.model.layers:
        count = [0]
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda each, count=count: _counted(each, count), lambda each: each
        )
        layer.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__())
        layer.register_forward_hook(lambda *_, hooks=hooks: hooks.__exit__())
        expected.append(count)
    real(**tokens())
    assert packed == [count for (count,) in expected]


def _counted(tensor: Tensor, count: list[int]) -> Tensor:
    count[0] += 1
    return tensor


def test_a_batch_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ApplyError, match="batch is a Tensor; allowed: a mapping"):
        trace(build_shapes(CONFIGS["dense"]), torch.zeros(2, 8, dtype=torch.int64))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"model": None}, "model is a NoneType"),
        ({"batch": {1: torch.zeros(2)}}, "allowed: a mapping of the model's keyword arguments"),
        ({"batch": tokens("meta")}, "the batch is on the meta device"),
        ({"loss": 5}, "loss is a int; allowed: a function"),
        ({"loss": lambda model, batch: dense_loss(model, batch) * 1j}, "is complex"),
        ({"regions": "model.layers.0"}, "regions is a str; allowed: a list"),
        ({"regions": nn.Linear(1, 1)}, "regions is a Linear; allowed: a list"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_odd_arguments_are_told(odd: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"model": real_model(), "batch": tokens()}
    with pytest.raises(ApplyError, match=re.escape(said)):
        trace(**usual | odd)


class Hiding(torch.Tensor):
    """A tensor around another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Hiding:
        made: Hiding = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(each.inner if isinstance(each, Hiding) else each for each in args), **(kwargs or {}))
        return Hiding(out) if isinstance(out, Tensor) else out


class Layered(nn.Module):
    """Two layers, the second one listed first; each does `work` with what it computes."""

    def __init__(self, work: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Working(work), Working(work)])

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.layers[0](self.layers[1](hidden))
        return made


class Working(nn.Linear):
    def __init__(self, work: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(8, 8)
        self.work = work

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.work(hidden, super().forward(hidden).tanh())


@pytest.mark.parametrize(
    ("work", "regions", "said"),
    [
        (lambda _, made: made, ["layers.0", "layers.1"], "layers.1 runs where layers.0 is listed"),
        (
            lambda given, made: torch.autograd.grad(made.sum(), given, create_graph=True)[0],
            ["layers.1", "layers.0"],
            "a backward pass before the forward pass is done",
        ),
        (lambda _, made: made * (Hiding(made.detach()) * 2).inner, ["layers.1", "layers.0"], "what a Hiding holds"),
    ],
    ids=["order", "backward", "subclass"],
)
def test_what_is_no_step_is_refused(work: Any, regions: list[str], said: str) -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(ApplyError, match=said):
        trace(Layered(work), {"hidden": hidden}, regions=regions)


def test_a_first_layer_whose_input_needs_no_gradient_is_of_another_kind_with_and_without_numbers() -> None:
    real = Layered(lambda _, made: made)
    regions = ["layers.1", "layers.0"]
    graphs = [
        trace(real, {"hidden": torch.randn(4, 8)}, regions=regions),
        trace(real.to("meta"), {"hidden": torch.randn(4, 8)}, regions=regions, kernels_on="cpu"),
    ]
    inputs = [
        [each.constant for each in graph.of_layer("layers.0").storages if each.kind == "input"] for graph in graphs
    ]
    assert inputs == [[False], [False]]
    assert graphs[0].layers == graphs[1].layers
    assert len(graphs[0].kinds) == 2


class Mixing(nn.Module):
    """A layer around a module that other layers have as well, with a product with a sparse matrix."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(16, 16)
        self.register_buffer("mixing", torch.eye(8).to_sparse(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.sparse.mm(self.mixing, self.own(self.shared(hidden).relu()))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(16, 16)
        self.embedding = nn.Embedding(10, 16, sparse=True)
        self.blocks = nn.ModuleList(Mixing(shared) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_a_module_that_layers_share_keeps_its_parameters() -> None:
    model, ids = Mixed(), torch.arange(8)
    before = dict(model.named_parameters(remove_duplicate=False))
    for _ in range(2):
        trace(model, {"ids": ids}, regions=list(model.blocks))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] and before[name].grad is None for name in before)
