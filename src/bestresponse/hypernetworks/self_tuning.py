"""Self-tuning networks: a response with few numbers for each unit, and perturbations with a tuned scale."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tree
from ..errors import require, require_number
from ..problem import Problem
from .base import Hypernetwork, require_room


class SelfTuning(Hypernetwork):
    """The best response with a gate for each output unit, trained on perturbations whose scale is tuned as well.

        W_φ(λ) = W + V (λ − λ₀) ⊙_units R;   λ′ = λ + σ ⊙ ε,  ε ~ N(0, I)
        min over φ of E_ε L_T(w_φ(λ′), λ′);   min over λ and log σ of E_ε L_V(w_φ(λ′), λ′) − τ Σ log σ

    V has a row for each output unit of a weight, R the weight's shape: memory for two models and a vector [H]
    for each unit. Units are rows of linear, convolution and recurrent weights and entries of biases and norms
    (dimension 0 of anything else), features of embeddings, and output channels of transposed convolutions.

    ``problem.hyper`` holds the given hyper as ``hyper``, and ``log_scale``. While σ is tuned, the
    validation loss in `Tuner`'s history is that of perturbed λ, including the entropy.
    Pass `recentre` to `Tuner` as a callback.

    Args:
        problem: the two losses.
        scale: the initial σ, in each hyperparameter's own unit.
        entropy: τ ≥ 0; a larger τ keeps σ wider.
        samples: the number of ε to draw in each loss, which takes their mean.
        minimum: the lower bound of σ, which `Tuner` restores after each hyper-step.
        maximum: the upper bound.
        max_entries: the most entries that all V together may have.

    Attributes:
        gates: V, a parameter [units, H] for each weight; initially N(0, 1/H), from the global generator.
        directions: R, a parameter of the weight's shape for each weight; initially zero.

    Raises:
        ArgumentError: an argument is out of its range, or V would have more than ``max_entries`` entries.

    Reference: MacKay, Vicol, Lorraine, Duvenaud and Grosse (2019).
    """

    def __init__(
        self,
        problem: Problem,
        scale: float = 0.5,
        entropy: float = 1e-3,
        samples: int = 1,
        minimum: float = 1e-2,
        maximum: float = 3.0,
        max_entries: int = 2**28,
    ) -> None:
        super().__init__(problem, samples)
        _check(scale, entropy, minimum, maximum)
        self.entropy = entropy
        self._units = [units_of(problem.model, n, w) for n, w in problem.weights.items()]
        H = len(self.centre)
        require_room("SelfTuning", H * sum(u.count for u in self._units), max_entries, "Use Implicit()")
        weights = list(problem.weights.values())
        self.gates = nn.ParameterList(
            nn.Parameter(torch.randn_like(w.new_empty(u.count, H)) / math.sqrt(H))
            for u, w in zip(self._units, weights, strict=True)
        )
        self.directions = nn.ParameterList(nn.Parameter(torch.zeros_like(w)) for w in weights)
        self.problem = self.over_parameters(
            Perturbed(problem.hyper, torch.full_like(self.centre, math.log(scale)), minimum, maximum)
        )

    def changes(self, shift: Tensor) -> list[Tensor]:
        return [
            u.scaled(direction, gate @ shift.to(gate.device, gate.dtype))
            for u, gate, direction in zip(self._units, self.gates, self.directions, strict=True)
        ]

    def train_loss(self, hyper: Any, batch: Any) -> Tensor:
        """The mean of L_T(w_φ(λ′), λ′) over draws of λ′."""
        return self.mean_loss("train_loss", self._draws(hyper), batch)

    def val_loss(self, hyper: Any, batch: Any) -> Tensor:
        """The mean of L_V(w_φ(λ′), λ′) over draws of λ′, minus τ Σ log σ."""
        loss = self.mean_loss("val_loss", self._draws(hyper), batch)
        bonus: Tensor = self.entropy * hyper.log_scale.sum()
        return loss - bonus.to(loss.device, loss.dtype)

    @torch.no_grad()
    def scales(self) -> dict[str, Tensor]:
        """σ, named and shaped as the given problem's hyperparameters."""
        return _tree.unflatten(self.problem.hyperparameters["log_scale"].exp(), self.source.hyperparameters)

    def extra_repr(self) -> str:
        return f"entropy={self.entropy}, samples={self.samples}"

    def _draws(self, hyper: Any) -> list[Tensor]:
        vector, scale = self.vector(hyper.hyper), hyper.log_scale.exp()
        return [vector + scale * torch.randn_like(vector) for _ in range(self.samples)]


class Perturbed(nn.Module):
    """A module of hyperparameters, and the logarithmic scale of the perturbation of each.

    Args:
        hyper: the module.
        log_scale: the initial log σ, for all hyperparameters in one vector [H].
        minimum: the lower bound of σ.
        maximum: the upper bound.
    """

    def __init__(self, hyper: nn.Module, log_scale: Tensor, minimum: float, maximum: float) -> None:
        super().__init__()
        self.hyper, self.log_scale = hyper, nn.Parameter(log_scale)
        self.minimum, self.maximum = minimum, maximum

    @torch.no_grad()
    def project_(self) -> None:
        """Restore the bounds of the scales; `Tuner` calls this after each hyper-step."""
        self.log_scale.clamp_(math.log(self.minimum), math.log(self.maximum))

    def extra_repr(self) -> str:
        return f"minimum={self.minimum:.3g}, maximum={self.maximum:.3g}"


def _check(scale: float, entropy: float, minimum: float, maximum: float) -> None:
    for name, value in {"scale": scale, "entropy": entropy, "minimum": minimum, "maximum": maximum}.items():
        require_number(f"SelfTuning.{name}", value)
    require(0 <= entropy < math.inf, "SelfTuning.entropy", "≥ 0 and finite", entropy)
    require(0 < minimum < math.inf, "SelfTuning.minimum", "positive and finite", minimum)
    required = f"from minimum={minimum} to a finite maximum={maximum}"
    require(minimum <= scale <= maximum < math.inf, "SelfTuning.scale", required, scale)


@dataclass(frozen=True)
class Units:
    """The position of the output units of a weight: in its shape ``view``, factors broadcast from ``shape``."""

    view: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of units."""
        return math.prod(self.shape)

    def scaled(self, weight: Tensor, factors: Tensor) -> Tensor:
        """The weight with each unit multiplied by its entry of ``factors`` [units]."""
        return (weight.reshape(self.view) * factors.reshape(self.shape)).reshape(weight.shape)


def units_of(model: nn.Module, name: str, w: Tensor) -> Units:
    """The output units of a weight, by the module that it belongs to."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    view, axes = tuple(w.shape) or (1,), {0}
    if leaf == "weight" and isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        axes = {1}
    if leaf == "weight" and isinstance(owner, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        # [in, out/groups, ...]: the inputs of a group lead to its own outputs.
        view, axes = (owner.groups, w.shape[0] // owner.groups, *w.shape[1:]), {0, 2}
    return Units(view, tuple(n if axis in axes else 1 for axis, n in enumerate(view)))
