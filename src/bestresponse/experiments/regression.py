"""The losses of the experiments on regression sets: mean squared error, and a decay of the weights in training."""

from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error and the decay."""
    penalty: Tensor = decay(model)
    return val_loss(model, decay, batch) + penalty


def val_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the model's only output."""
    return example_losses(model, decay, batch).mean()


def example_losses(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    """The squared error of each example."""
    error: Tensor = model(batch[0]).squeeze(1) - batch[1]
    return error.square()
