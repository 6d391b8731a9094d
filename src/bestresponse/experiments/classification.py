"""The losses on labelled sets: cross-entropy of a model's logits, and in training a penalty that takes the model."""

import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


def predict(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """The logits [N, classes]."""
    outputs: Tensor = model(batch[0])
    return outputs


def output_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Their mean cross-entropy with the classes [N]."""
    return F.cross_entropy(outputs, batch[1])


def val_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return output_loss(predict(model, hyper, batch), batch)


def train_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy and the penalty hyper(model)."""
    penalty: Tensor = hyper(model)
    return val_loss(model, hyper, batch) + penalty
