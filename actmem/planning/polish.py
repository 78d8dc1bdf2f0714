"""A choice made better by what the simulation says, one value of one layer at a time.

The program chooses among the options of each layer, which are a few dozen, and it takes copies to flow evenly. In a
stack of many layers neither costs much: what one option has too much of, that of another layer lacks. In a stack of a
few it does, and there the simulation is so fast that small changes can all be tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.planning.options import Option, OptionMaker
from actmem.planning.simulation import LayerPlan
from actmem.planning.terrain import Terrain

FEW_LAYERS = 4
"""Of a stack that is worth it."""
_MOST_PLAYED = 4000
"""So many layers, of all steps that are played through, until the search takes the best that it has found."""


def polished(
    terrain: Terrain, makers: Sequence[OptionMaker], layers: Sequence[LayerPlan], budget_bytes: int
) -> tuple[Option, ...]:
    """Options of the layers that are no slower than what `layers`, which fit the budget, do with them, and fit too."""
    options = [maker.option_of(plan) for maker, plan in zip(makers, layers, strict=True)]
    best = terrain.run([option.plan for option in options])
    left, found_one = _MOST_PLAYED // len(options), True
    while found_one and left > 0:
        found_one = False
        for layer, maker in enumerate(makers):
            for other in maker.changed(options[layer]):
                changed = [*options[:layer], other, *options[layer + 1 :]]
                left -= 1
                simulation = terrain.run([option.plan for option in changed])
                if simulation.peak_bytes <= budget_bytes and simulation.seconds < best.seconds:
                    best, options, found_one = simulation, changed, True
    return tuple(options)
