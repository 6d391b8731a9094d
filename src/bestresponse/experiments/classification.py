"""Losses on labelled sets: the cross-entropy of a model's logits, plus a penalty hyper(model) in training."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def predict(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """The logits [N, classes]."""
    outputs: Tensor = model(batch[0])
    return outputs


def output_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy of logits with the classes [N]."""
    return F.cross_entropy(outputs, batch[1])


def val_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy."""
    return output_loss(predict(model, hyper, batch), batch)


def train_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy plus the penalty hyper(model)."""
    penalty: Tensor = hyper(model)
    return val_loss(model, hyper, batch) + penalty


def example_losses(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of correctly classified examples."""
    return _correct(model, batch) / len(batch[1])


def error(model: nn.Module, batch: Batch) -> float:
    """The share of wrongly classified examples."""
    return (len(batch[1]) - _correct(model, batch)) / len(batch[1])


def squared_norm(model: nn.Module) -> Tensor:
    """‖w‖² of all parameters."""
    return torch.stack([w.square().sum() for w in model.parameters()]).sum()


@torch.no_grad()
def set_to_zero(model: nn.Module) -> None:
    """Set all parameters to zero."""
    for w in model.parameters():
        w.zero_()


@torch.no_grad()
def _correct(model: nn.Module, batch: Batch) -> int:
    pieces = zip(torch.split(batch[0], 500), torch.split(batch[1], 500), strict=True)
    return sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in pieces)
