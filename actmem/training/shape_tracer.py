"""Graphs of the same step with batches of other shapes."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedModel

from actmem.config.schema import RunConfig
from actmem.graph import Graph
from actmem.models.regions import find_regions
from actmem.tracing.stretching import Stretching, shortened
from actmem.training.traced import shapes_of, trace_step


class ShapeTracer:
    """Traces the step of a run with other numbers of sequences, and of tokens in each.

    The first one is traced whole, and once more with a few of the layers. If the one follows from the other, the few
    layers are traced of the shapes that come after it, and the whole again only where one runs other ops.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._model = shapes_of(run)
        self._learnt: list[Stretching] = []

    def __call__(self, micro_batch_size: int, sequence_length: int) -> Graph:
        """The graph for that many sequences of that length. Raises what `trace_step` does."""
        train = self._run.train.model_copy(update={"micro_batch_size": micro_batch_size})
        data = self._run.data.model_copy(update={"sequence_length": sequence_length})
        run = self._run.model_copy(update={"train": train, "data": data})
        short = None if self._short_model is None else trace_step(run, self._short_model)
        if short is None:
            return trace_step(run, self._model)
        told = next(filter(None, (each.of(short) for each in self._learnt)), None)
        return told or self._learn(short, trace_step(run, self._model))

    @cached_property
    def _short_model(self) -> PreTrainedModel | None:
        return shortened(self._model, list(find_regions(self._model)))

    def _learn(self, short: Graph, whole: Graph) -> Graph:
        """Know from now on how a whole step follows from a short one of its kind; returns the whole one."""
        stretching = Stretching.learnt(short, whole)
        if stretching is not None:
            self._learnt.append(stretching)
        return whole
