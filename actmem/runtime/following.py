"""The tapes of all calls after a region's first.

`ScriptedTape` follows the script of an earlier call: whether an op goes on the tape depends on its position alone, so
an op that does not costs next to nothing. When the call leaves the script (another op at this position, another number
of saved tensors), the rest of it is saved as autograd would, and the next call learns anew.

`StreamingTape` is for regions whose ops differ from call to call (experts run one by one): each op's path is worked out
and the plan's rules are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from actmem.planning import Action
from actmem.runtime.kinds import kind_of
from actmem.runtime.learning import DETACH, EDIT, RECORD, SKIP, Script, reason_to_keep
from actmem.runtime.scope import Scope
from actmem.runtime.tape import Handle, RegionCall, Tape, Value


class ScriptedTape(Tape):
    """Does at each op what the script says for its position."""

    def __init__(self, call: RegionCall, script: Script, *, verify: bool) -> None:
        super().__init__(call, verify=verify)
        self._script = script
        self._funcs = script.funcs
        self._steps = script.steps
        self._position = 0
        self.left_script = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DETACH:
            return self._detach(args[0])
        if self.is_suspended or (step := self._next_step(func)) == SKIP:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if step == EDIT:
            self.before_edit(kind_of(func), args, kwargs)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if step == RECORD or not kind_of(func).is_random(args, kwargs):
            self.record(func, self._script.paths[self._position - 1], args, kwargs, out)
        return out

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable Function has run."""
        if self._next_step(func) == RECORD:
            self.record(func, self._script.paths[self._position - 1], args, kwargs, out)

    def close(self) -> None:
        """End the recording; a call that saved another number of tensors than the script has left it too."""
        if self._position != len(self._funcs) or self.num_packed != self._script.num_packed:
            self.left_script = True
        super().close()

    def _detach(self, tensor: Tensor) -> Tensor:
        out: Tensor = DETACH(tensor)
        if self.has_recorded(tensor):
            self.record(DETACH, "detach", (tensor,), None, out)
        return out

    def _next_step(self, func: Any) -> int:
        position = self._position
        if position < len(self._funcs) and self._funcs[position] is func and not self.left_script:
            self._position = position + 1
            return self._steps[position]
        self.left_script = True
        return EDIT if getattr(func, "_schema", None) is not None and kind_of(func).edits else SKIP


class StreamingTape(Tape):
    """Asks the rules about every op's path. A view goes on the tape exactly when what it views is there."""

    def __init__(
        self, call: RegionCall, region: nn.Module, action_of: Callable[[str], Action], *, verify: bool
    ) -> None:
        super().__init__(call, verify=verify)
        self.scope = Scope(region)
        self._action_of = action_of
        self._packed: list[Value] = []

    def pack(self, tensor: Tensor) -> Handle:
        """Autograd's pack hook."""
        handle = super().pack(tensor)
        self._packed.append(handle.value)
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_suspended:
            return func(*args, **kwargs)
        kind = kind_of(func)
        path = self.scope.path_of(kind.name)
        if kind.edits:
            self.before_edit(kind, args, kwargs)
        out = func(*args, **kwargs)
        if kind.view:
            recorded = self.has_recorded(args[0])
        else:
            recorded = self._action_of(path) is Action.RECOMPUTE
        if recorded and reason_to_keep(kind, types, args, kwargs) is None:
            self.record(func, path, args, kwargs, out)
        return out

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable Function has run."""
        path = self.scope.path_of(name)
        if self._action_of(path) is Action.RECOMPUTE:
            self.record(func, path, args, kwargs, out)

    def close(self) -> None:
        """End the recording. Only ops that lead to a packed value will be replayed, so only they count as uses."""
        _recount_uses(self._packed)
        self._packed.clear()
        super().close()


def _recount_uses(packed: list[Value]) -> None:
    """Set the uses of all values that lead to a packed one: the handles, and each op on the way once."""
    counts = Counter(id(value) for value in packed)
    pending = [value for value in packed if value.op is not None]
    reached = {id(value): value for value in pending}
    ops: set[int] = set()
    while pending:
        op = pending.pop().op
        assert op is not None
        if id(op) in ops:
            continue
        ops.add(id(op))
        for value in op.inputs:
            if value.op is not None:
                counts[id(value)] += 1
                reached[id(value)] = value
                pending.append(value)
    for key, value in reached.items():
        value.uses = counts[key]
