"""The slope of the validation loss along one direction of the hyperparameters, by retraining."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .. import _tree
from .._tree import Tree
from ..errors import Error, EvaluationError
from ..hyperparameters.orthant import fitting, orthant_wise
from ..problem import Passes
from .findings import Bench, Obstacle

_MOMENTUM = 0.9
# A training loss that falls by this multiple of both losses at the start has no minimum nearby.
_BOUND = 1e3


@dataclass(frozen=True)
class Retraining:
    """d/dε L_V(w_S(λ + ε d)), with w_S after S steps from the present weights on the training batch.

    Attributes:
        slope: the difference quotient.
        error: the difference between the quotients of two step sizes, plus their rounding error.
        steps: S.
        before, after: the training loss on the batch before and after the steps, at the present hyperparameters.
    """

    slope: float
    error: float
    steps: int
    before: float
    after: float

    @property
    def certain(self) -> bool:
        """Whether the slope is well above its error."""
        return abs(self.slope) > 5.0 * self.error


def retrain(bench: Bench, direction: Tree, predicted: float, highest: float, steps: int) -> Retraining | None:
    """Train at ±ε for two sizes of ε, by heavy-ball steps with rate 1/(2 λ_max); None if training fails.

    ``predicted`` is the slope along ``direction`` according to a hypergradient; it determines the size of ε.
    """
    problem = bench.problem
    live = problem.hyperparameters
    double = all(w.dtype == torch.float64 for w in problem.weights.values())

    def trained(step: float) -> tuple[float, float, float]:
        """Training loss before and after the steps, and validation loss, at λ + step · direction."""
        with _tree.put_back(problem.live()), problem.undisturbed(bench.seed) as passes:
            with torch.no_grad():
                for name, p in live.items():
                    p.add_(direction[name], alpha=step)
            before = float(passes.train_loss(bench.train).detach())
            _train(passes, bench.train, 0.5 / highest, steps)
            after = float(passes.train_loss(bench.train).detach())
            return before, after, float(passes.val_loss(bench.val).detach())

    try:
        before, after, value = trained(0.0)
        if not before - after <= _BOUND * (abs(before) + abs(bench.val_loss)):
            bench.add(
                "warning",
                f"train_loss falls without bound: from {before:.3g} to {after:.3g} in {steps} steps. The weights lie "
                "near a saddle or a slope without a minimum, where they have no best response. Add a regulariser to "
                "train_loss, or train from other weights.",
                Obstacle.UNBOUNDED,
            )
            return None
        wanted = (1e-6 if double else 1e-3) * (abs(value) or 1.0)
        size = min(wanted / max(abs(predicted), 1e-300), 0.1 * (1.0 + _tree.norm(_tree.detached(live))))
        coarse, fine = ((trained(h)[-1] - trained(-h)[-1]) / (2.0 * h) for h in (size, size / 2.0))
    except Error as error:
        if isinstance(error, EvaluationError) and "finite" in str(error):
            text = f"train_loss falls without bound, or its curvature grows, within {steps} steps: {error}"
            bench.add("warning", text, Obstacle.UNBOUNDED)
        else:
            bench.add("note", f"not compared: {error}")
        return None
    precision = torch.finfo(torch.float64 if double else torch.float32).eps
    rounding = 4.0 * precision * abs(value) / size
    return Retraining(fine, abs(coarse - fine) + rounding, steps, before, after)


def _train(passes: Passes, batch: object, rate: float, steps: int) -> None:
    """Make heavy-ball steps on the live weights, whose values the caller restores."""
    problem = passes.problem
    weights = list(problem.weights.values())
    optimizer = torch.optim.SGD(weights, rate, momentum=_MOMENTUM)
    penalties = [(single.model, fitting(problem.hyper, single.model)[0]) for single in problem.singles]
    for _ in range(steps):
        loss = passes.train_loss(batch)
        passes.carry(passes.buffers())  # running statistics follow the training
        for w, g in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
            w.grad = g
        with ExitStack() as stack:
            for model, kinked in penalties:
                stack.enter_context(orthant_wise(model, *kinked))
            optimizer.step()
        optimizer.zero_grad()
