"""AdamW, and a learning rate that is a function of the step alone, so that there is no schedule to save or resume."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from actmem.config.schema import TrainConfig

# Where torch has one kernel for the whole update: faster, and without the foreach path's temporaries.
_FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ones of `parameters`. Weight decay is for matrices; norms and biases have none.

    Parameters on different ranks' meshes are groups of their own: one kernel updates a group.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for each in parameters:
        if each.requires_grad:
            groups.setdefault((each.ndim >= 2, getattr(each, "device_mesh", None)), []).append(each)
    fused = all(each.device.type in _FUSED_DEVICES for members in groups.values() for each in members)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if is_matrix else 0.0}
            for (is_matrix, _), members in sorted(groups.items(), key=lambda item: not item[0][0])
        ],
        lr=config.lr,
        betas=config.betas,
        fused=fused,
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step`, counted from 1: a linear warm-up, then a cosine to ``lr * min_lr_share``."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_share + (1 - config.min_lr_share) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
