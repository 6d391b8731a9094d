"""Weights of training examples, computed by a network from their features or from their losses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentTypeError, EvaluationError, require_integer


class ExampleWeights(nn.Module):
    """A weight for each example of a batch, from a network of its features; their mean is one.

        c_n = N softplus(f(x_n)) / Σ_m softplus(f(x_m))

    Its parameters are hyperparameters. A training loss is ``(hyper(x) * losses).mean()`` with the losses of the single
    examples. Equal scores, for example from a last layer of zeros, give equal weights.

    Args:
        network: maps features [N, ...] to scores [N] or [N, 1].

    Raises:
        ArgumentTypeError: ``network`` is not a module.

    Reference: the paper's section 5.4; Ren, Zeng, Yang and Urtasun (2018); Shu et al. (2019).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ArgumentTypeError(
                "ExampleWeights.network must be a module that maps features to scores; got "
                f"{type(network).__name__}. For a weight for each index, use Weights(n)."
            )
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


class LossWeights(nn.Module):
    """A weight for each example from its own loss, by a network V: a meta-weight-net.

        Φ(ℓ) = ∫₀^ℓ V(t) dt,   so that ∂Φ(ℓ_n)/∂w = V(ℓ_n) ∂ℓ_n/∂w

    The network's parameters are hyperparameters. A training loss is ``hyper(losses).mean()`` with the losses of the
    single examples. The usual form, ``(V(losses.detach()) * losses).mean()``, has the same gradient in w. But the
    derivative of that gradient also has the term V'(ℓ_n) ∂ℓ_n/∂w (∂ℓ_n/∂w)ᵀ, which autograd does not see behind
    ``detach``. So a hypergradient of it is wrong. Here the training loss is the integral, computed by Gauss-Legendre
    quadrature, and all derivatives are those of the quadrature.

    Args:
        network: maps losses [M, 1] to scores [M, 1]; V is their sigmoid.
        nodes: the number of nodes of the quadrature; ≥ 2. It calls the network with N · nodes values. A smooth network
            (tanh, softplus) needs fewer nodes than one with kinks.

    Raises:
        ArgumentTypeError: ``network`` is not a module.

    Reference: Shu et al. (2019).
    """

    def __init__(self, network: nn.Module, nodes: int = 16) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ArgumentTypeError(
                "LossWeights.network must be a module that maps losses [M, 1] to scores [M, 1]; got "
                f"{type(network).__name__}."
            )
        require_integer("LossWeights.nodes", nodes, 2)
        self.network = network
        places, shares = _gauss_legendre(nodes)
        self._places: Tensor
        self._shares: Tensor
        self.register_buffer("_places", places, persistent=False)
        self.register_buffer("_shares", shares, persistent=False)

    def forward(self, losses: Tensor) -> Tensor:
        """Φ of each loss, in the shape of ``losses``."""
        points = losses[..., None] * self._places.to(losses.dtype)
        total: Tensor = losses * (self.weights(points) @ self._shares.to(losses.dtype))
        return total

    def weights(self, losses: Tensor) -> Tensor:
        """V of each loss: the weight of the example, from 0 to 1, in the shape of ``losses``.

        Raises:
            EvaluationError: the network does not return a score for each loss.
        """
        scores: Tensor = self.network(losses.reshape(-1, 1))
        if scores.numel() != losses.numel():
            raise EvaluationError(
                f"LossWeights.network must return a score for each of {losses.numel()} losses; got "
                f"{list(scores.shape)}. Begin it with nn.Linear(1, ...) and end it with nn.Linear(..., 1)."
            )
        return scores.sigmoid().reshape(losses.shape)


def _gauss_legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """The nodes and weights of Gauss-Legendre quadrature on [0, 1], from the eigenvalues of the Jacobi matrix."""
    k = torch.arange(1, nodes, dtype=torch.float64)
    beside = k / (4.0 * k.square() - 1.0).sqrt()
    places, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    return (1.0 + places) / 2.0, vectors[0].square()
