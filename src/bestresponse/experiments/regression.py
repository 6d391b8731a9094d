"""Losses on regression sets: the mean squared error, plus a decay of the weights in training."""

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error plus the decay."""
    penalty: Tensor = decay(model)
    return val_loss(model, decay, batch) + penalty


def val_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the model's single output."""
    return example_losses(model, decay, batch).mean()


def example_losses(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """The squared error of each example."""
    error: Tensor = model(batch[0]).squeeze(1) - batch[1]
    return error.square()


def halves(x: Tensor, y: Tensor) -> list[Batch]:
    """Two random halves of the examples, drawn with torch's global generator."""
    return [(x[rows], y[rows]) for rows in torch.randperm(len(x)).chunk(2)]
