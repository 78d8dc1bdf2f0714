"""AdamW, and a learning rate that is a function of the step alone, so that there is no schedule to save or resume."""

from __future__ import annotations

import math

import torch
from torch import nn

from actmem.config.schema import TrainConfig

# Where torch has one kernel for the whole update: faster, and without the foreach path's temporaries.
_FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters. Weight decay is for matrices; norms and biases have none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(parameter.device.type in _FUSED_DEVICES for parameter in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, fused=fused
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


def clip_gradients(model: nn.Module, limit: float | None) -> float:
    """The norm of all gradients together; where it exceeds `limit`, they are scaled down to it, in place."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
    return float(norm)
