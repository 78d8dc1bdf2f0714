"""Torch's own ways of recomputing, so that they can be measured side by side with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from actmem._compat import OpOverload
from actmem.errors import ApplyError
from actmem.runtime.kinds import kind_of


class TorchFull:
    """``torch-full``: `torch.utils.checkpoint`, non-reentrant, around each layer."""

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        _refuse_cache(kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class TorchSelective:
    """``torch-sac``: torch's selective checkpoint around each layer, saving matmul-like ops and attention."""

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        _refuse_cache(kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_compute_intensive)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _refuse_cache(kwargs: dict[str, Any]) -> None:
    if any(kwargs.get(name) is not None for name in ("cache", "past_key_values", "layer_past")):
        raise ApplyError(
            "a key-value cache is on, and torch's own checkpoint would append to it twice: set "
            "model.config.use_cache = False, or take one of our policies, which append once"
        )


def _save_compute_intensive(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    intensive = isinstance(func, OpOverload) and kind_of(func).compute_intensive
    return CheckpointPolicy.MUST_SAVE if intensive else CheckpointPolicy.PREFER_RECOMPUTE


YARDSTICKS: dict[str, Callable[[], TorchFull | TorchSelective]] = {"torch-full": TorchFull, "torch-sac": TorchSelective}
