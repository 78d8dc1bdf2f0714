"""All that `actmem check` finds out about a configuration: faults and warnings of its text, of its plan file, and of
the layers of its model, each with its place in the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actmem.cli.planned import YARDSTICKS, graph_for, rules_on
from actmem.config.document import Document, in_order
from actmem.config.loading import Reading
from actmem.config.rules import idle_settings
from actmem.config.schema import RunConfig
from actmem.errors import ApplyError, ConfigError, Fault, ModelError, PlanError
from actmem.planning import Plan
from actmem.planning.sections import way_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actmem.graph import Graph
    from actmem.planning.matching import Match
    from actmem.reporting.effect import Effect
    from actmem.runtime.engine import RuleSource

# What a forward pass says of sizes and fields that do not fit together.
_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


@dataclass
class Findings:
    """All that was found out about a configuration: it runs where there are no `faults`."""

    run: RunConfig | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    effect: Effect | None = None


def findings_of(reading: Reading) -> Findings:
    """Look at everything that a configuration speaks of. Its model is made, without weights, where the text has no
    fault: then torch has to be loaded."""
    run, in_plan = reading.config, _faults_in_plan(reading)
    if run is None or reading.faults:
        return Findings(faults=[*reading.faults, *in_plan])
    look = _Look(run, reading.document)
    look.at_settings()
    look.at_model(plan_is_sound=not in_plan)
    found = look.found
    found.faults = [*in_order(map(reading.document.placed, found.faults)), *in_plan]
    found.warnings = in_order(map(reading.document.placed, found.warnings))
    found.run = None if found.faults else run
    return found


def _faults_in_plan(reading: Reading) -> list[Fault]:
    """What is wrong in the plan file, with that file's lines."""
    run = reading.config
    if run is None or run.plan is None or any(fault.path == "plan" for fault in reading.faults):
        return []
    try:
        Plan.load(run.plan)
    except PlanError as error:
        told = [replace(fault, path=f"{run.plan}: {fault.path}") for fault in error.faults]
        return told or [reading.document.placed(Fault("plan", str(error), str(run.plan)))]
    return []


class _Look:
    """What settings and layers say to a sound configuration. One look does not keep another from being taken."""

    def __init__(self, run: RunConfig, document: Document) -> None:
        self.run = run
        self.document = document
        self.found = Findings()

    def at_settings(self) -> None:
        """Look at settings that have no effect, and at what this package does not do."""
        self.found.warnings += idle_settings(self.run)
        if self.run.platform != "torch":
            problem = f"{self.run.platform} is not supported; only torch is"
            self.found.faults.append(Fault("platform", problem, self.run.platform, "torch"))

    def at_model(self, *, plan_is_sound: bool) -> None:
        """Make the model without its weights, and look at all that needs it."""
        from actmem.training.traced import shapes_of

        model: PreTrainedModel | None = None
        with self._noting():
            model = shapes_of(self.run)
        if model is None:
            return
        if self.run.policy not in YARDSTICKS:
            graph = self._traced(model)
            source = self._rules(model, graph) if plan_is_sound else None
            with self._noting():
                if graph is not None:
                    self._at_patterns(graph)
                if graph is not None and source is not None:
                    self._at_rules(source, graph)

    def _traced(self, model: PreTrainedModel) -> Graph | None:
        with self._noting():
            return graph_for(self.run, model)
        return None

    def _rules(self, model: PreTrainedModel, graph: Graph | None) -> RuleSource | None:
        with self._noting():
            return None if graph is None and self.run.memory_budget is not None else rules_on(self.run, model, graph)
        return None

    def _at_patterns(self, graph: Graph) -> None:
        """Look at what the sections name, and whether they give any op two fates."""
        from actmem.planning.clashes import complaints_of_clashes
        from actmem.planning.matching import match_patterns

        self.found.matches = match_patterns(self.run, graph)
        self.found.faults += map(self.document.complained, complaints_of_clashes(self.run, graph))

    def _at_rules(self, source: RuleSource, graph: Graph) -> None:
        """Look at what the rules do: which do nothing, what becomes of the bytes, and whether they have room."""
        from actmem.planning.idle_settings import idle_complaints
        from actmem.reporting.effect import effect_of

        if source.made_for is not None and graph.made_for is not None:
            source.made_for.refuse_other_inputs(source.name, graph.made_for.inputs, graph.made_for.autocast)
        idle = idle_complaints(self.run, self.found.matches, graph, source)
        told = self.found.faults if self.run.memory.strict_matching else self.found.warnings
        told += [replace(self.document.complained(each), path=path) for path, each in idle]
        self.found.effect = effect_of(graph, source, min_swap_bytes=self.run.memory.min_swap_bytes)
        if source.may_swap:
            self._at_tiers(source, graph)

    def _at_tiers(self, source: RuleSource, graph: Graph) -> None:
        """Look at the places to swap to, where this machine has the device that the run is for."""
        from actmem.runtime.swap.building import wanted_tiers
        from actmem.runtime.swap.scratch_file import is_in_memory
        from actmem.training.capacity import too_small_tiers
        from actmem.training.device import choose_device

        memory = self.run.memory
        try:
            device = choose_device(self.run.train.device)
        except ConfigError:
            return
        try:
            wanted = wanted_tiers(memory, device, source.tiers)
            if "disk" in wanted and memory.disk_path is not None and is_in_memory(memory.disk_path):
                problem = "lies in memory (tmpfs), so swapping there frees none"
                where = Fault("memory.disk_path", problem, str(memory.disk_path), "a directory on a disk")
                self.found.warnings.append(where)
            self.found.faults += too_small_tiers(graph, source, memory, device)
        except ApplyError as error:
            self.found.faults.append(Fault("memory.tier", str(error), memory.tier))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what is raised inside, which ends there."""
        try:
            yield
        except ApplyError as error:
            self.found.warnings.append(Fault("model", f"patterns and bytes cannot be told: {error}"))
        except PlanError as error:
            self.found.faults.append(Fault(way_of(self.run), str(error)))
        except ConfigError as error:
            self.found.faults += error.faults
        except (ModelError, *_FORWARD_ERRORS) as error:
            self.found.faults.append(Fault("model", str(error)))
