"""An embedding whose rows are spread over the tensor parallel ranks, as those of a head that is tied to it are."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from actmem.parallel.parameters import shard_parameters, summed, surround


class SpreadVocabulary(ParallelStyle):
    """Each rank looks up the tokens whose rows it has; the results are summed over the ranks.

    Torch's own style for this works out the gradient of the whole embedding on every rank, and takes the row of the
    padding token for a row of each rank's part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        shard_parameters(module, device_mesh)
        assert isinstance(module.weight, DTensor)
        rows = module.weight.to_local().shape[0]
        per_rank = -(-module.num_embeddings // device_mesh.size())
        first = min(per_rank * device_mesh.get_local_rank(), module.num_embeddings)
        padding = module.padding_idx
        module.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None

        def before(tokens: Tensor) -> tuple[tuple[Tensor], Tensor]:
            elsewhere = (tokens < first) | (tokens >= first + rows)
            return ((tokens - first).masked_fill(elsewhere, 0),), elsewhere

        def after(out: Tensor, elsewhere: Tensor) -> Tensor:
            return summed(out.masked_fill(elsewhere.unsqueeze(-1), 0), device_mesh)

        surround(module, before, after)
        return module
