"""Weights of training examples, computed by a network from their features."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import EvaluationError


class ExampleWeights(nn.Module):
    """A weight for each example of a batch, from a network of its features; their mean is one.

        c_n = N softplus(f(x_n)) / Σ_m softplus(f(x_m))

    Its parameters are hyperparameters. A training loss is ``(hyper(x) * losses).mean()`` with the losses of the single
    examples. Equal scores, for example from a last layer of zeros, give equal weights.

    Args:
        network: maps features [N, ...] to scores [N] or [N, 1].

    Reference: the paper's section 5.4; Ren, Zeng, Yang and Urtasun (2018); Shu et al. (2019).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The weights [N].

        Raises:
            EvaluationError: the network does not return a score for each example.
        """
        scores: Tensor = self.network(x)
        if scores.numel() != len(x) or scores.shape[:1] != x.shape[:1]:
            raise EvaluationError(
                f"ExampleWeights.network must return a score for each of {len(x)} examples, [N] or [N, 1]; got "
                f"{list(scores.shape)}. End it with nn.Linear(..., 1)."
            )
        weights = F.softplus(scores.reshape(-1))
        return weights * (len(x) / weights.sum())
