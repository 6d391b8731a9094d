"""A hypernetwork that is linear in the hyperparameters."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _tree
from ..errors import ArgumentError, require, require_number
from ..problem import Problem
from .base import Hypernetwork, require_room


class LinearHypernetwork(Hypernetwork):
    """The best response as a linear function of all hyperparameters, trained on perturbed ones.

        w_φ(λ) = w₀ + Φ (λ − λ₀);   min over φ = (w₀, Φ) of E_λ′ L_T(w_φ(λ′), λ′);   min over λ of L_V(w_φ(λ), λ)

    Φ has an entry for each pair of weight and hyperparameter: use it for few hyperparameters, or small models. Φ starts
    at zero, w₀ at the present weights, λ₀ at the present hyperparameters.
    With local sampling, pass `recentre` to `Tuner` as a callback.

    Args:
        problem: the two losses.
        scale: the standard deviation of λ′ in each hyperparameter, in its own unit (a logarithm's, for a
            logarithmic decay).
        sampling: "local": λ′ ~ N(λ, scale²) around the present λ; "global": λ′ ~ N(λ₀, scale²).
        samples: the number of λ′ to draw in each training loss, which takes their mean.
        max_entries: the most entries that Φ may have.

    Attributes:
        slopes: Φ, a parameter [*shape, H] for each weight.

    Raises:
        ArgumentError: an argument is out of its range, or Φ would have more than ``max_entries`` entries.

    Reference: Lorraine and Duvenaud (2018).
    """

    def __init__(
        self,
        problem: Problem,
        scale: float = 0.5,
        sampling: Literal["local", "global"] = "local",
        samples: int = 1,
        max_entries: int = 2**28,
    ) -> None:
        super().__init__(problem, samples)
        require_number("LinearHypernetwork.scale", scale)
        require(0 < scale < math.inf, "LinearHypernetwork.scale", "positive and finite", scale)
        if sampling not in ("local", "global"):
            raise ArgumentError(f'LinearHypernetwork.sampling must be "local" or "global"; got {sampling!r}.')
        self.scale, self.sampling = scale, sampling
        H = len(self.centre)
        require_room(
            "LinearHypernetwork", H * _tree.size(problem.weights), max_entries, "Use SelfTuning or Implicit()"
        )
        self.slopes = nn.ParameterList(
            nn.Parameter(w.new_zeros(*w.shape, H)) for w in problem.weights.values()
        )
        self.problem = self.over_parameters(problem.hyper)

    def changes(self, shift: Tensor) -> list[Tensor]:
        return [slope @ shift.to(slope.device, slope.dtype) for slope in self.slopes]

    def train_loss(self, hyper: Any, batch: Any) -> Tensor:
        """The mean of L_T(w_φ(λ′), λ′) over draws of λ′."""
        middle = self.vector(hyper) if self.sampling == "local" else self.centre
        points = [middle + self.scale * torch.randn_like(middle) for _ in range(self.samples)]
        return self.mean_loss("train_loss", points, batch)

    def val_loss(self, hyper: Any, batch: Any) -> Tensor:
        """L_V(w_φ(λ), λ)."""
        return self.mean_loss("val_loss", [self.vector(hyper)], batch)

    def recentre(self, tuner: Any = None) -> None:
        if self.sampling == "global":
            raise ArgumentError(
                'LinearHypernetwork.recentre needs sampling="local"; got "global", which draws around λ₀. '
                "Leave the callback out."
            )
        super().recentre(tuner)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, sampling={self.sampling!r}, samples={self.samples}"
