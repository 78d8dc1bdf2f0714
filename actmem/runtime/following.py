"""The tapes of all calls after a region's first.

`ScriptedTape` follows the script of an earlier call: whether an op goes on the tape depends on its position alone, so
an op that does not costs next to nothing. When the call leaves the script (another op at this position, another number
of saved tensors), the rest of it is saved as autograd would, and the next call learns anew.

`StreamingTape` is for regions whose ops differ from call to call (experts run one by one): each op's path is worked out
and the plan's rules are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from actmem._compat import raw_call, storage_id
from actmem.graph import COMMUNICATION
from actmem.planning import Action
from actmem.planning.plan import RuleSet
from actmem.runtime.kinds import kind_of, replay_call
from actmem.runtime.learning import (
    DETACH,
    EDIT,
    RECORD,
    RECORD_COLLECTIVE,
    RECORD_UNLESS_RANDOM,
    RECORD_VIEW,
    SKIP,
    SWAP_SOURCE,
    Script,
    reason_to_keep,
    tensors_in,
)
from actmem.runtime.scope import Scope
from actmem.runtime.swap.storage import SwapOrder
from actmem.runtime.tape import Tape
from actmem.runtime.values import Handle, RegionCall, Value


class ScriptedTape(Tape):
    """Does at each op what the script says for its position."""

    def __init__(self, call: RegionCall, script: Script, *, verify: bool) -> None:
        super().__init__(call, verify=verify)
        self._script = script
        self._funcs = script.funcs
        self._calls = script.calls
        self._steps = script.steps
        self._end = len(script.calls)
        self._position = 0 if script.watches_ops else self._end
        self.left_script = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = self._position
        if self._funcs[position] is not func:
            return self._run_off_script(func, args, kwargs or {})
        self._position = position + 1
        step = self._steps[position]
        if step == SKIP:
            return self._calls[position](*args, **kwargs) if kwargs else self._calls[position](*args)
        kwargs = kwargs or {}
        if step == EDIT:
            return self.run_edit(self._calls[position], kind_of(func), args, kwargs)
        out = self._calls[position](*args, **kwargs)
        if step == SWAP_SOURCE:
            self.order_outputs(out, self._script.source_orders[position])
            return out
        plain = step != RECORD_UNLESS_RANDOM and torch.is_grad_enabled() and not types
        if plain or step == RECORD_COLLECTIVE or not self._must_keep(func, types, args, kwargs):
            self.record(
                replay_call(func, kind_of(func)) if step == RECORD_COLLECTIVE else self._calls[position],
                self._script.paths[position],
                args,
                kwargs,
                out,
                shares_version=step == RECORD_VIEW,
            )
        return out

    @property
    def watches_ops(self) -> bool:
        """Whether it has to see ops; else the tensors that autograd saves are enough."""
        return self._script.watches_ops

    def order_of(self, index: int, tensor: Tensor) -> SwapOrder | None:
        """Whether the `index`-th tensor to be packed is to be swapped."""
        orders = self._script.pack_orders
        return orders[index] if index < len(orders) and not self.left_script else None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let ops pass unseen."""
        position, self._position = self._position, self._end
        with super().suspended():
            yield
        self._position = position

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable Function has run."""
        position = self._position
        if not self._script.watches_ops:
            return
        if self._funcs[position] is not func:
            self._leave_script()
        else:
            self._position = position + 1
            if self._steps[position] == RECORD:
                self.record(func, self._script.paths[position], args, kwargs, out)

    def close(self) -> None:
        """End the recording; a call that saved another number of tensors than the script has left it too."""
        if self._position != self._end or self.num_packed != self._script.num_packed:
            self.left_script = True
        super().close()

    def _must_keep(self, func: Any, types: Any, args: Any, kwargs: Any) -> bool:
        """A script speaks of positions; what must always be saved can still depend on the call."""
        return reason_to_keep(kind_of(func), types, args, kwargs) is not None

    def _run_off_script(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is DETACH:
            out = func(*args)
            if self.has_recorded(args[0]):
                self.record(raw_call(func), "detach", args, None, out, shares_version=True)
            return out
        if not self.is_suspended:
            self._leave_script()
            if kind_of(func).edits:
                return self.run_edit(func, kind_of(func), args, kwargs)
        return func(*args, **kwargs)

    def _leave_script(self) -> None:
        self.left_script = True
        self._position = self._end


class StreamingTape(Tape):
    """Asks the rules about every op's path. A view goes on the tape exactly when what it views is there."""

    def __init__(
        self,
        call: RegionCall,
        region: nn.Module,
        volatile: set[int],
        rules: RuleSet,
        *,
        verify: bool,
    ) -> None:
        super().__init__(call, verify=verify)
        self.scope = Scope(region)
        self._volatile = volatile
        self._rules = rules
        self._packed: list[Value] = []

    def pack(self, tensor: Tensor) -> Handle:
        """Autograd's pack hook."""
        handle = super().pack(tensor)
        if handle.value is not None:
            self._packed.append(handle.value)
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_suspended:
            return func(*args, **kwargs)
        kind = kind_of(func)
        path = self.scope.path_of(kind.name)
        if kind.edits:
            return self.run_edit(func, kind, args, kwargs)
        out = func(*args, **kwargs)
        action = self._rules.action_of(path)
        if kind.view:
            recorded = self.has_recorded(args[0])
        else:
            recorded = action is Action.RECOMPUTE and not self._reads_volatile(args, kwargs)
        kept = reason_to_keep(kind, types, args, kwargs)
        if recorded and (kept is None or (kept == COMMUNICATION and self._rules.communicates_again(path))):
            self.record(replay_call(func, kind), path, args, kwargs, out, shares_version=kind.shares_version)
        elif action is Action.SWAP and kept is None and not kind.view:
            self.order_outputs(out, SwapOrder(path, self._rules.tier_of(path)))
        return out

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable Function has run."""
        path = self.scope.path_of(name)
        action = self._rules.action_of(path)
        if action is Action.RECOMPUTE:
            self.record(func, path, args, kwargs, out)
        elif action is Action.SWAP:
            self.order_outputs(out, SwapOrder(path, self._rules.tier_of(path)))

    def close(self) -> None:
        """End the recording. Only ops that lead to a packed value will be replayed, so only they count as uses."""
        for holder in self._raw:
            if isinstance(holder, Value):
                holder.uses = 0
        _recount_uses(self._packed)
        self._packed.clear()
        super().close()

    def keep_what_leaves_a_shard(self, output: Any) -> None:
        """A module that FSDP2 shards by itself has given this: no replay outside of it can begin before it."""
        for tensor in tensors_in((output,)):
            value = self._value_of(tensor)
            if value is not None and value.op is not None:
                value.op, value.tensor = None, tensor
                self._raw.append(value)

    def _reads_volatile(self, args: Any, kwargs: Any) -> bool:
        return bool(self._volatile) and any(
            storage_id(each) in self._volatile for each in tensors_in((*args, *kwargs.values()))
        )


def _recount_uses(packed: list[Value]) -> None:
    """Set the uses of all values that lead to a packed one: the handles, and each op on the way once."""
    counts = Counter(id(value) for value in packed)
    pending = [value for value in packed if value.op is not None]
    reached = {id(value): value for value in packed}
    ops: set[int] = set()
    while pending:
        op = pending.pop().op
        assert op is not None
        if id(op) in ops:
            continue
        ops.add(id(op))
        for value in op.inputs:
            counts[id(value)] += 1
            reached[id(value)] = value
            if value.op is not None:
                pending.append(value)
    for key, value in reached.items():
        value.uses = counts[key]
