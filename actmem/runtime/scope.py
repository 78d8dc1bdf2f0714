"""Which module of a region is running: the first half of an op's path."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Scope:
    """Follows the modules of one region while it runs, and names the ops they call.

    Hooks on modules stay installed only while `following`, so that an ordinary call pays nothing for them.
    """

    def __init__(self, region: nn.Module) -> None:
        self._names = {id(module): name for name, module in region.named_modules()}
        self._shards = {id(module) for name, module in region.named_modules() if name and _is_sharded(module)}
        self._stack = [""]
        self._counts: Counter[str] = Counter()

    @contextmanager
    def following(self, leave_shard: Callable[[Any], None]) -> Iterator[None]:
        """Follow the modules called within this context.

        `leave_shard` is told the output of each module inside the region that FSDP2 shards by itself. Its parameters
        are there while the backward pass is inside it, so only then can values be made from them again.
        """
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(partial(self._leave, leave_shard), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def path_of(self, op_name: str) -> str:
        """The path of the op of this name that runs now; a second one of that name in a module gets ``#1``."""
        path = f"{self._stack[-1]}.{op_name}" if self._stack[-1] else op_name
        count = self._counts[path]
        self._counts[path] += 1
        return f"{path}#{count}" if count else path

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, leave_shard: Callable[[Any], None], module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._shards:
            leave_shard(output)
        if len(self._stack) > 1:
            self._stack.pop()


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # while nobody has imported it, nothing is
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
