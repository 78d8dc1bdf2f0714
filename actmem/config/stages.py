"""The stages of a pipeline: how many there are, which layers each has, and on which rank it runs.

Stages follow one another as the layers do. With more than one to a rank they go round the ranks in a loop (rank 0 has
the stages 0, pp_size, ...), or down and up again in a V (rank 0 has the first and the last). One rank alone is no
pipeline: it has one stage with all layers, whatever the schedule.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from actmem.config.schema import ParallelConfig
from actmem.config.shown import shown
from actmem.errors import ConfigError, Fault

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(parallel: ParallelConfig) -> int:
    """Stages that the schedule puts on each rank; those that take any number have as many as `pp_layers` says, or 2."""
    if parallel.pp_size == 1 or parallel.pp_schedule in SINGLE_STAGE_SCHEDULES:
        return 1
    if parallel.pp_schedule in V_SCHEDULES or parallel.pp_layers is None:
        return 2
    return max(2, len(parallel.pp_layers) // parallel.pp_size)


def num_stages(parallel: ParallelConfig) -> int:
    """Stages of the pipeline over all ranks."""
    return parallel.pp_size * stages_per_rank(parallel)


def layers_of_stages(parallel: ParallelConfig, num_layers: int) -> tuple[tuple[int, int], ...]:
    """First layer of each stage, and the one after its last: those of `pp_layers`, or else an even cut.

    The first stages have one layer more where the cut leaves a remainder, since the last one has the head and the loss.
    Raises `ConfigError` where `num_layers` layers cannot be cut that way.
    """
    stages = num_stages(parallel)
    given = parallel.pp_layers if parallel.pp_size > 1 else None
    if num_layers < stages or (given is not None and (len(given), sum(given)) != (stages, num_layers)):
        problem = f"{num_layers} layers cannot be cut into {shown(stages)} stages"
        problem += "" if given is None else f" of {shown(given)} layers"
        allowed = "a layer or more for each stage, and all layers in pp_layers"
        raise ConfigError([Fault("parallel", problem, allowed=allowed)])
    return tuple(pairwise(accumulate(given or _even_cut(num_layers, stages), initial=0)))


def stages_of_rank(parallel: ParallelConfig, pp_rank: int) -> tuple[int, ...]:
    """The stages that run on rank `pp_rank` of the pipeline, in the order of their layers."""
    if parallel.pp_size > 1 and parallel.pp_schedule in V_SCHEDULES:
        return pp_rank, 2 * parallel.pp_size - 1 - pp_rank
    return tuple(range(pp_rank, num_stages(parallel), parallel.pp_size))


def _even_cut(num_layers: int, stages: int) -> tuple[int, ...]:
    each, remainder = divmod(num_layers, stages)
    return tuple(each + (stage < remainder) for stage in range(stages))
