"""One region: which tape each of its calls gets."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import closing
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem._compat import is_compiler_watching
from actmem.errors import ApplyError, PlanError
from actmem.graph import RegionGraph
from actmem.planning import Action
from actmem.planning.fates import fates_under
from actmem.planning.plan import INPUT_PATH, RuleSet
from actmem.runtime.engine import Engine
from actmem.runtime.following import ScriptedTape, StreamingTape
from actmem.runtime.learning import LearningTape, Script, tensors_in
from actmem.runtime.replay import unpack
from actmem.runtime.stats import RegionStats
from actmem.runtime.swap.storage import SwapOrder
from actmem.runtime.tape import Tape
from actmem.runtime.values import RegionCall, ReplayCounters

Course = Script | RuleSet | Literal["learn"]
"""How calls of one key run: along a script, by asking the rules at each op, or learning."""


class PlannedRegion:
    """Runs the calls of one region under the engine's plan. It never refers to the module itself, which it must not
    keep alive."""

    def __init__(self, name: str, layer: int, kind: Hashable, engine: Engine) -> None:
        self.counters = ReplayCounters()
        self.graph: RegionGraph | None = None
        self._stats = RegionStats(name, layer)
        self._kind = kind
        self._engine = engine
        self._own: dict[Hashable, Course] = {}
        self._seen: set[Hashable] = set()

    @property
    def stats(self) -> RegionStats:
        """What the plan did to this region so far."""
        for name in ReplayCounters.__slots__:
            setattr(self._stats, name, getattr(self.counters, name))
        return self._stats

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of `module`."""
        if torch.compiler.is_compiling() or is_compiler_watching():
            raise ApplyError(f"{self._stats.name} is being compiled while a plan is applied: remove one of the two")
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._engine.refusal is not None:
            raise PlanError(self._engine.refusal)
        if getattr(module, "gradient_checkpointing", False) and module.training:
            raise ApplyError(
                f"Hugging Face gradient checkpointing is on in {self._stats.name} as well as a plan, so it would be "
                "recomputed twice: turn it off (model.gradient_checkpointing_disable(), named "
                "activation_checkpointing_disable() in newer versions), or remove the plan"
            )
        return self._run(module, forward, args, kwargs, _key_of(module, args, kwargs))

    def _run(self, module: nn.Module, forward: Any, args: Any, kwargs: Any, key: Hashable) -> Any:
        if key not in self._seen:
            self._engine.check_inputs(
                _input_shapes(args, kwargs), _autocast(_device_type(args, kwargs, module)), first=not self._seen
            )
        self._stats.num_calls += 1
        if self._stats.num_calls > 1:
            self._engine.report_no_effect()
        course = self._course(key)
        verify = self._engine.verifies(first=key not in self._seen or course == "learn")
        swapper = self._engine.swapper
        swaps = None if swapper is None else swapper.begin_call(self._stats.name)
        device_type = _device_type(args, kwargs, module)
        call = RegionCall(self._stats.name, device_type, self.counters, self._engine.owns, swaps)
        out = self._run_course(course, call, verify, module, forward, args, kwargs, key)
        if swapper is not None:
            swapper.end_call()
        self._seen.add(key)
        return out

    def _run_course(
        self,
        course: Course,
        call: RegionCall,
        verify: bool,
        module: nn.Module,
        forward: Any,
        args: Any,
        kwargs: Any,
        key: Hashable,
    ) -> Any:
        if isinstance(course, Script):
            if call.swaps is None and course.rules.actions <= {Action.SAVE}:
                return forward(*args, **kwargs)
            scripted = ScriptedTape(call, course, verify=verify)
            if course.input_order is not None:
                scripted.order_outputs(self._gradient_inputs(args, kwargs), course.input_order)
            return self._run_scripted(scripted, forward, args, kwargs, key)
        volatile = self._engine.volatile
        if isinstance(course, RuleSet):
            streaming = StreamingTape(call, module, volatile, course, verify=verify)
            if course.action_of(INPUT_PATH) is Action.SWAP:
                order = SwapOrder(INPUT_PATH, course.tier_of(INPUT_PATH))
                streaming.order_outputs(self._gradient_inputs(args, kwargs), order)
            return self._run_streaming(streaming, forward, args, kwargs)
        learning = LearningTape(call, module, volatile, verify=verify)
        return self._run_learning(learning, forward, args, kwargs, key)

    def _course(self, key: Hashable) -> Course:
        own = self._own.get(key)
        if own is not None:
            return own
        shared = self._engine.shared.get(self._shared_key(key))
        if shared is None:
            return "learn"
        if key not in self._seen:
            self._take(shared)
        return shared

    def _run_scripted(self, tape: ScriptedTape, forward: Any, args: Any, kwargs: Any, key: Hashable) -> Any:
        out = self._record(tape, forward, args, kwargs, watch_ops=tape.watches_ops)
        if tape.left_script:
            self._own[key] = self._next_course(key)
        return out

    def _next_course(self, key: Hashable) -> Course:
        """After a call left its script: learn a script of this region's own; after that failed too, ask the rules."""
        own = self._own.get(key)
        return own.rules if isinstance(own, Script) else "learn"

    def _run_streaming(self, tape: StreamingTape, forward: Any, args: Any, kwargs: Any) -> Any:
        self._stats.num_streamed_calls += 1
        with tape.scope.following(tape.keep_what_leaves_a_shard):
            return self._record(tape, forward, args, kwargs)

    def _run_learning(self, tape: LearningTape, forward: Any, args: Any, kwargs: Any, key: Hashable) -> Any:
        self._stats.num_learning_calls += 1
        try:
            with tape.scope.following(tape.keep_what_leaves_a_shard):
                out = self._record(tape, forward, args, kwargs)
            graph = tape.graph()
            rules = self._engine.rules_of(self._stats.layer, graph)
            fates = fates_under(graph, rules, min_swap_bytes=self._engine.min_swap_bytes)
            script = tape.settle(fates, rules)
        finally:
            tape.forget()
        self._take(script)
        if self._own.get(key) == "learn":
            self._own[key] = script
        else:
            self._engine.share(self._shared_key(key), script)
        return out

    def _record(self, tape: Tape, forward: Any, args: Any, kwargs: Any, *, watch_ops: bool = True) -> Any:
        recording = tape if watch_ops else closing(tape)
        with self._engine.activate(tape), saved_tensors_hooks(tape.pack, unpack), recording:
            return forward(*args, **kwargs)

    def _gradient_inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors among a region's inputs that somebody made for it: not parameters, masks or rotary tables."""
        tensors = [each for each in tensors_in((*args, *kwargs.values())) if each.requires_grad]
        return [each for each in tensors if not self._engine.owns(each)]

    def _take(self, script: Script) -> None:
        self.graph = script.fates.graph
        self._stats.take(script.fates)
        self._engine.note_matches(self._stats.layer, script)

    def _shared_key(self, key: Hashable) -> Hashable:
        return (self._kind, self._engine.source.group(self._stats.layer), key)


def _key_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    autocast = _autocast(_device_type(args, kwargs, module))
    described = [_describe(arg) for arg in args]
    described += [(name, _describe(arg)) for name, arg in kwargs.items()]
    return (module.training, autocast, *described)


def _autocast(device_type: str) -> str | None:
    enabled = torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if enabled else None


def _input_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The tensors given to a region, for a plan's fingerprint: ``0: 2x1024x512 float32``."""
    named = {**{str(index): arg for index, arg in enumerate(args)}, **kwargs}
    return tuple(
        f"{name}: {'x'.join(map(str, arg.shape))} {str(arg.dtype).removeprefix('torch.')}"
        for name, arg in named.items()
        if isinstance(arg, Tensor)
    )


def _describe(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return (type(arg), arg.shape, arg.dtype, arg.requires_grad)
    if isinstance(arg, (tuple, list)):
        return tuple([_describe(each) for each in arg])
    return arg if arg is None or isinstance(arg, (bool, str)) else type(arg)


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> str:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            return arg.device.type
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
