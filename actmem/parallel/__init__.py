"""Models over many ranks: copies and shards of them, tensors, experts and the sequence spread over ranks.

`torch.distributed` does the work: FSDP2, DDP, DTensor. What is here says what is cut how, and in which order.
"""

from actmem.parallel.gradients import clip_gradients, gradient_norm
from actmem.parallel.layout import lay_out_model, shard_tensors
from actmem.parallel.mesh import Mesh, MeshSizes, Sizes, build_mesh
from actmem.parallel.shard import shard_data

__all__ = [
    "Mesh",
    "MeshSizes",
    "Sizes",
    "build_mesh",
    "clip_gradients",
    "gradient_norm",
    "lay_out_model",
    "shard_data",
    "shard_tensors",
]
