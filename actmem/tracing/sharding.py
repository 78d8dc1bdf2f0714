"""What one rank has of the training state where FSDP2 shares it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from actmem.graph import Standing
from actmem.runtime.kinds import num_bytes

GATHERED_LAYERS = 2
"""So many layers have whole parameters at once: the one that runs, and the next."""


def _alone(_: nn.Parameter) -> int:
    return 1


@dataclass(frozen=True)
class Sharding:
    """`num_ranks`: over how many ranks a parameter is shared out, with its gradient and optimizer state. What is
    gathered goes again when its layer has run; all of it `stays` in a pipeline, whose stages run again and again."""

    num_ranks: Callable[[nn.Parameter], int] = _alone
    stays: bool = False

    def share(self, parameter: nn.Parameter, size: int) -> int:
        """This rank's share of `size` bytes."""
        return -(-size // self.num_ranks(parameter))

    def standing(self, model: nn.Module, layers: Sequence[nn.Module]) -> Standing:
        """What stands on this rank through a step."""
        own = {each: self.share(each, num_bytes(each)) for each in model.parameters()}
        trained = sum(size for each, size in own.items() if each.requires_grad)
        return Standing(
            parameters=sum(own.values()) + self._gathered(model, layers),
            buffers=sum(map(num_bytes, model.buffers())),
            gradients=trained,
            optimizer=2 * trained,
        )

    def _gathered(self, model: nn.Module, layers: Sequence[nn.Module]) -> int:
        """Copies of whole parameters. Those outside the layers stay from the first use to the last."""
        of_layers = [self._shared(layer.parameters()) for layer in layers]
        everything = self._shared(model.parameters())
        if self.stays:
            return everything
        return everything - sum(of_layers) + sum(sorted(of_layers)[-GATHERED_LAYERS:])

    def _shared(self, parameters: Iterable[nn.Parameter]) -> int:
        return sum(num_bytes(each) for each in parameters if self.num_ranks(each) > 1)


WHOLE = Sharding()
"""Nothing is shared out."""
