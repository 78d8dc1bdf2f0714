"""Tensors of all ranks in one directory, each rank writing what it has, and read back under any layout.

The files are safetensors with the place of each shard in its header, as torch.distributed.checkpoint writes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write this rank's tensors; all ranks must call it. What several ranks have whole is written once."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    save(dict(tensors), storage_writer=writer)


def names_in(directory: Path) -> set[str]:
    """The names of the tensors in a directory of safetensors files."""
    metadata = HuggingFaceStorageReader(str(directory)).read_metadata()
    return set(metadata.state_dict_metadata)


def load_shards(tensors: Mapping[str, Tensor], directory: Path, *, alone: bool = False) -> None:
    """Fill `tensors`, whole or distributed ones, in place. All ranks must call it, unless this one is `alone`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=alone)
