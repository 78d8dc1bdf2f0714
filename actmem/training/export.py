"""The trained model on disk, as any user of Hugging Face loads it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from actmem.errors import CheckpointError
from actmem.parallel.world import World
from actmem.training.checkpoint import tensors_of
from actmem.training.sealed_directory import passing_directory, writing_directory
from actmem.training.sharded_files import load_shards, save_shards
from actmem.training.tokenizing import Tokenizer


def export_model(model: PreTrainedModel, tokenizer: Tokenizer, target: Path) -> None:
    """Write `model` and its tokenizer to the directory `target`, whole or not at all, in place of what was there.

    Raises `CheckpointError` where it cannot be written.
    """
    model.config.use_cache = True  # off only while training
    _name_the_end(model, tokenizer)
    try:
        with writing_directory(target) as directory:
            model.save_pretrained(directory)
            tokenizer.fast.save_pretrained(directory)
            for weights in directory.glob("*.safetensors"):  # safetensors leaves them to their owner alone
                weights.chmod((directory / "config.json").stat().st_mode)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the trained model cannot be written to {target}: {error}; free space and start the run again: it goes on "
            "from its last checkpoint"
        ) from error
    finally:
        model.config.use_cache = False


def _name_the_end(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """A model that knows no token that ends a text ends one with that of the tokenizer it was trained on."""
    for config in (model.config, model.generation_config):
        if config is not None and config.eos_token_id is None:
            config.eos_token_id = tokenizer.fast.eos_token_id


def gather_model(
    parts: Sequence[PreTrainedModel], whole: PreTrainedModel | None, directory: Path, world: World
) -> None:
    """Put what all ranks have of a model into `whole`, which the first one gives, by way of files in `directory`."""
    with passing_directory(directory, "gathered") if world.is_first else nullcontext(directory) as made:
        scratch = world.tell(made)
        save_shards({name: tensor for part in parts for name, tensor in tensors_of(part).items()}, scratch)
        world.wait()
        if whole is not None:
            load_shards(tensors_of(whole), scratch, alone=True)
