"""Weights that minimise the training loss of each fold, for all folds side by side."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batches import weighted
from ..errors import EvaluationError, require, require_integer, require_number
from ..passes import random_state
from ..problem import Problem
from .objective import Objective, dots

# A step must lower the loss by this share of what its slope promises; how often it is halved before it is given up.
_DECREASE, _HALVINGS = 1e-4, 30
# How many sizes of a step are tried in which several weights may stop at a kink.
_TOGETHER = 3
# Newton's steps treat curvatures below this share of the largest as zero.
_FLAT = 1e-12

_NOT_MINIMISED = (
    "Minimise must end at a minimum of the training loss; {} of {} ended where the next step still promised to lower "
    "it. The loss may have kinks besides those of an ℓ1 penalty (l1_loss, relu): take a torch optimiser there. Or it "
    "needs more steps: raise max_steps. Hypergradients are right at a minimum only."
)


@dataclass(frozen=True)
class Minimise:
    """Train the weights to the minimum of the training loss: a ``weight_optimizer`` of `Tuner` for full batches.

    With few weights the steps are Newton's, w ← w − H⁻¹ g with the dense Hessian H of each fold; with more they are
    those of limited-memory BFGS. On `Folds` each fold has its own directions, step sizes and end; one pass evaluates
    the losses of all. Under a penalty with a kink at zero, such as ``WeightDecay(power=1)``, steps stay within the
    orthant, so that weights reach exactly zero. In the end, running statistics of norms are those of the batches.

    The loss must be the same at each evaluation, without dropout or mini-batches, and needs weights of one dtype and
    device. It warns if a fold ends where there is no minimum, as at the kink of another loss.

    Args:
        max_steps: the largest number of steps in a call.
        tolerance: a fold ends when a step promises to lower its loss by less than this share.
        newton_limit: the largest number of weights of a fold for Newton's steps.
        history: the number of earlier steps that limited-memory BFGS uses.

    Raises:
        EvaluationError: the loss has another value at the same weights.

    Reference: Liu and Nocedal (1989); Andrew and Gao (2007).
    """

    max_steps: int = 1_000
    tolerance: float = 1e-12
    newton_limit: int = 300
    history: int = 20

    def __post_init__(self) -> None:
        require_integer("Minimise.max_steps", self.max_steps, 1)
        require_integer("Minimise.newton_limit", self.newton_limit, 0)
        require_integer("Minimise.history", self.history, 1)
        require_number("Minimise.tolerance", self.tolerance)
        require(self.tolerance > 0, "Minimise.tolerance", "positive", self.tolerance)

    def __call__(self, problem: Problem, batch: Any) -> None:
        objective = Objective(problem, weighted(batch))
        w = objective.weights()
        before = random_state.snapshot()
        loss, gradient = objective(w)
        if not random_state.same(before, random_state.snapshot()) and not torch.equal(loss, objective(w)[0]):
            raise EvaluationError(
                "Minimise needs a training loss that is the same at each evaluation; got another value at the same "
                "weights. Take dropout and other random draws out of it, or use a torch optimiser: weight_optimizer="
                "lambda weights: torch.optim.Adam(weights, 1e-3)."
            )
        pairs = _Pairs(self.history)
        newton = w.shape[1] <= self.newton_limit
        least = max(self.tolerance, 4.0 * torch.finfo(w.dtype).eps)
        moving, stuck = torch.ones_like(loss, dtype=torch.bool), torch.zeros_like(loss, dtype=torch.bool)
        for _ in range(self.max_steps):
            slope, at_kink = objective.one_sided(w, gradient)
            along = partial(_newton, objective.hessian(w)) if newton else pairs.direction
            direction = torch.where(moving[:, None], _aligned(along, slope, at_kink), 0.0)
            promise = -dots(direction, slope)
            moving &= promise > least * loss.abs()
            if not bool(moving.any()):
                break
            new, new_loss, new_gradient = _search(objective, w, loss, slope, direction)
            moved = (new != w).any(dim=1)
            stuck |= moving & ~moved & (promise > math.sqrt(least) * loss.abs())
            moving &= moved
            pairs.add(new - w, new_gradient - gradient - objective.rates * (new.sign() - w.sign()))
            w, loss, gradient = new, new_loss, new_gradient
        else:
            stuck |= moving & (promise > math.sqrt(least) * loss.abs())
        if bool(stuck.any()):
            problem.warn_once("not minimised", _NOT_MINIMISED.format(int(stuck.sum()), len(stuck)))
        objective.settle(w)


def _search(
    objective: Objective, w: Tensor, loss: Tensor, slope: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each row's step until it lowers the loss; return the weights, losses and gradients there.

    Weights that would cross a kink stop there. If that spoils the step, it ends where the first weight stops.
    """
    size = torch.ones_like(loss)
    crossing = (objective.rates > 0) & (w * direction < 0)
    limit = torch.where(crossing, -w / direction, torch.inf)
    rounding = torch.finfo(w.dtype).eps * loss.abs()
    good = torch.zeros_like(loss, dtype=torch.bool)
    for number in range(_HALVINGS):
        if number == _TOGETHER:
            size = torch.where(good, size, torch.minimum(size, limit.amin(dim=1)))
        new = torch.where(limit <= size[:, None], 0.0, w + size[:, None] * direction)
        new_loss, gradient = objective(new)
        good = new_loss <= loss + _DECREASE * dots(slope, new - w) + rounding
        if bool(good.all()):
            return new, new_loss, gradient
        size = torch.where(good, size, size / 2)
    new = torch.where(good[:, None], new, w)
    return new, *objective(new)


def _aligned(along: Callable[[Tensor, Tensor], Tensor], slope: Tensor, at_kink: Tensor) -> Tensor:
    """A direction within the free weights: one at a kink moves only to the side that lowers the loss, or not at all."""
    free = ~at_kink | (slope != 0)
    direction = along(slope, free)
    while bool((wrong := at_kink & free & (direction * slope > 0)).any()):
        free = free & ~wrong
        direction = along(slope, free)
    downhill = dots(direction, slope) < 0
    return torch.where(downhill[:, None], direction, -slope * free)


def _newton(hessian: Tensor, slope: Tensor, free: Tensor) -> Tensor:
    """−|H|⁻¹ slope within the free weights of each row; along directions without curvature zero."""
    both = free[:, :, None] & free[:, None, :]
    values, vectors = torch.linalg.eigh(torch.where(both, hessian, 0.0))
    size = values.abs()
    inverse = torch.where(size > _FLAT * size.amax(dim=1, keepdim=True), 1.0 / size, 0.0)
    along = inverse * torch.einsum("kij,ki->kj", vectors, torch.where(free, slope, 0.0))
    return -torch.einsum("kij,kj->ki", vectors, along) * free


class _Pairs:
    """The last steps and changes of the gradient, and the directions that they give, for each row."""

    def __init__(self, most: int) -> None:
        self._most, self._pairs = most, list[tuple[Tensor, Tensor, Tensor]]()
        self._scale: Tensor | None = None

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a step; a row whose step met no positive curvature leaves it out."""
        along, square = dots(step, change), dots(change, change)
        fits = along > torch.finfo(step.dtype).eps * square
        self._pairs = [*self._pairs, (step, change, torch.where(fits, 1.0 / along, 0.0))][-self._most :]
        earlier = torch.ones_like(along) if self._scale is None else self._scale
        self._scale = torch.where(fits, along / square, earlier)

    def direction(self, slope: Tensor, free: Tensor) -> Tensor:
        """−H slope, by the two-loop recursion, without the weights that are not free."""
        if self._scale is None:
            size: Tensor = torch.linalg.vector_norm(slope, dim=1, keepdim=True)
            return -slope * free / size.clamp(min=1.0)
        q: Tensor = slope * free
        factors: list[Tensor] = []
        for step, change, inverse in reversed(self._pairs):
            factors.append(inverse * dots(step, q))
            q = q - factors[-1][:, None] * change
        q = q * self._scale[:, None]
        for (step, change, inverse), factor in zip(self._pairs, reversed(factors), strict=True):
            q = q + (factor - inverse * dots(change, q))[:, None] * step
        return -q * free
