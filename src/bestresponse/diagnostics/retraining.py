"""The change of the validation loss along one direction of the hyperparameters, by training again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import Error
from ..hyperparameters.orthant import fitting, joint_rates, one_sided_, stop_at_zero_
from ..problem import Passes
from .findings import Bench

_MOMENTUM = 0.9


@dataclass(frozen=True)
class Retraining:
    """d/dε L_V(w_S(λ + ε d)), with w_S after S steps from the present weights on the training batch.

    Attributes:
        slope: the difference quotient.
        error: how far those of two step sizes are apart, and their rounding.
        steps: S.
        before, after: the training loss of the batch before and after the steps, at the present hyperparameters.
    """

    slope: float
    error: float
    steps: int
    before: float
    after: float


def retrain(bench: Bench, direction: Tree, predicted: float, highest: float, steps: int) -> Retraining | None:
    """Train twice for two sizes of ε, by heavy-ball steps of 1/λ_max; None where training fails.

    ``predicted`` is what a hypergradient says of the slope along ``direction``, and sets the size of ε.
    """
    problem = bench.problem
    live = problem.hyperparameters
    kept = _tree.copy(live)
    double = all(w.dtype == torch.float64 for w in problem.weights.values())

    losses: list[float] = []

    def after(step: float) -> float:
        try:
            with torch.no_grad():
                for name, p in live.items():
                    p.add_(direction[name], alpha=step)
            with problem.undisturbed(bench.seed) as passes:
                if step == 0.0:
                    losses.append(float(passes.train_loss(bench.train).detach()))
                weights = _trained(passes, bench.train, 0.5 / highest, steps)
                if step == 0.0:
                    losses.append(float(passes.train_loss(bench.train, weights).detach()))
                return float(passes.val_loss(bench.val, weights).detach())
        finally:
            _tree.write_(live, kept)

    try:
        value = after(0.0)
        wanted = (1e-6 if double else 1e-3) * (abs(value) or 1.0)
        size = min(wanted / max(abs(predicted), 1e-300), 0.1 * (1.0 + _tree.norm(kept)))
        coarse, fine = ((after(h) - after(-h)) / (2.0 * h) for h in (size, size / 2.0))
    except Error as error:
        bench.say("note", "re-training", f"not compared: {error}")
        return None
    precision = torch.finfo(torch.float64 if double else torch.float32).eps
    return Retraining(fine, abs(coarse - fine) + 4.0 * precision * abs(value) / size, steps, *losses)


def _trained(passes: Passes, batch: object, rate: float, steps: int) -> Tree:
    """The weights after heavy-ball steps, outside the model."""
    weights: dict[str, Tensor] = {n: w.detach().clone() for n, w in passes.problem.weights.items()}
    velocity = _tree.zeros_like(weights)
    problem = passes.problem
    rates = joint_rates(problem.model, fitting(problem.hyper, problem.model)[0])
    for _ in range(steps):
        leaves = {n: w.requires_grad_() for n, w in weights.items()}
        loss = passes.train_loss(batch, leaves)
        passes.carry(passes.buffers())  # running statistics move along
        gradient = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            for (name, w), g in zip(weights.items(), gradient, strict=True):
                side = one_sided_(g, w, rates[name]) if g is not None and name in rates else None
                if g is not None:
                    velocity[name].mul_(_MOMENTUM).add_(g)
                weights[name] = w.detach() - rate * velocity[name]
                if side is not None:
                    stop_at_zero_(weights[name], side)
    return {n: w.requires_grad_() for n, w in weights.items()}
