"""Fixed ways to make a plan. A policy is one small function from a region's graph to rules."""

from __future__ import annotations

import re
from collections.abc import Callable

from actmem.graph import RegionGraph
from actmem.planning.min_cut import cheapest_to_hold
from actmem.planning.plan import Action, Rule

Policy = Callable[[RegionGraph], tuple[Rule, ...]]


def save_all(graph: RegionGraph) -> tuple[Rule, ...]:
    """``none``: hold what autograd holds."""
    return ()


def recompute_all(graph: RegionGraph) -> tuple[Rule, ...]:
    """``full``: hold a region's inputs and what must always be saved; make everything else again."""
    return (Rule(".*", Action.RECOMPUTE),)


def recompute_mlp(graph: RegionGraph) -> tuple[Rule, ...]:
    """``mlp``: make the feed-forward part again, dense or mixture of experts, matmuls included; save the rest."""
    return (Rule(r"(.*\.)?(mlp|feed_forward|ffn|moe|block_sparse_moe)\..*", Action.RECOMPUTE),)


def recompute_cheap(graph: RegionGraph) -> tuple[Rule, ...]:
    """``selective``: re-run no compute-intensive op, and hold the fewest bytes under that rule."""
    held = cheapest_to_hold(graph)
    choices = {storage: op for storage, op in graph.creators.items() if graph.storages[storage].kept is None}
    saved = {graph.ops[op].path for storage, op in choices.items() if storage in held}
    recomputed = {graph.ops[op].path for storage, op in choices.items()} - saved
    return (Rule(".*", Action.RECOMPUTE), *(Rule(pattern, Action.SAVE) for pattern in patterns_of(saved, recomputed)))


def swap_attention(graph: RegionGraph) -> tuple[Rule, ...]:
    """``attention-swap``: move what ``self_attn`` makes and the backward pass reads away from the device."""
    return (Rule(r"(.*\.)?self_attn\..*", Action.SWAP),)


def swap_all(graph: RegionGraph) -> tuple[Rule, ...]:
    """``layer-swap``: move all that a region would hold away from the device, its inputs included."""
    return (Rule(".*", Action.SWAP),)


def patterns_of(saved: set[str], recomputed: set[str]) -> list[str]:
    """Regexes that match all of `saved` and none of `recomputed`: one for all ops of a name in a module where they all
    are saved, so that it speaks for further ones too (experts run one by one in varying number)."""
    mixed = {_without_number(path) for path in recomputed}
    patterns = {
        re.escape(path) if _without_number(path) in mixed else rf"{re.escape(_without_number(path))}(#\d+)?"
        for path in saved
    }
    return sorted(patterns)


def _without_number(path: str) -> str:
    return path.partition("#")[0]


POLICIES: dict[str, Policy] = {
    "none": save_all,
    "full": recompute_all,
    "mlp": recompute_mlp,
    "selective": recompute_cheap,
    "attention-swap": swap_attention,
    "layer-swap": swap_all,
}
SWAPPING = frozenset({"attention-swap", "layer-swap"})
