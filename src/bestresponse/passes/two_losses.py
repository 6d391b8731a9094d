"""The part of a problem that a run of the losses uses."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from ..distributed import Group
from .edits import Edits


class TwoLosses(Protocol):
    """A training and a validation loss over weights and hyperparameters, as `Problem` has them.

    Attributes:
        weights, hyperparameters: the live parameters by name.
        edits: compares both before and after the passes.
        group: the processes over which derivatives are the mean.
    """

    model: nn.Module
    hyper: nn.Module
    train_loss: Any
    val_loss: Any
    edits: Edits
    group: Group
    weights: dict[str, nn.Parameter]
    hyperparameters: dict[str, nn.Parameter]

    @property
    def val_mode(self) -> str:
        """The mode of the validation loss: "eval" or "as_is"."""

    def live(self) -> Mapping[str, Tensor]:
        """Weights and hyperparameters together."""

    def warn_once(self, key: object, message: str) -> None:
        """Give a warning the first time that ``key`` comes up."""
