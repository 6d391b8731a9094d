"""Two problems that are small enough for the exact hypergradient: a regression set and a few digits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br

from .. import _tree
from .._tree import Tree
from ..diagnostics import measuring
from ..solvers.direct import dense
from . import classification, data, regression

_NEWTON_STEPS = 60
_PRECISION = 1e-12


@dataclass(frozen=True)
class Case:
    """A problem with its batches, the module of its losses, and its initial weights."""

    name: str
    seed: int
    problem: br.Problem
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    losses: Any
    initial: Tree

    @cached_property
    def optimum(self) -> Tree:
        """w*(λ)."""
        self.put(self.initial)
        self.solve()
        return _tree.copy(self.problem.weights)

    @cached_property
    def exact(self) -> Tensor:
        """The hypergradient at the optimum, flat."""
        self.put(self.optimum)
        return _tree.flatten(
            br.hypergradient(self.problem, self.train, self.val, br.Implicit(br.Exact())).total
        )

    @cached_property
    def units(self) -> tuple[float, int]:
        """Seconds and bytes of a training gradient."""
        return measuring.seconds({"": self.gradient}, 200)[""], measuring.peak_bytes(self.gradient)

    def put(self, weights: Tree) -> None:
        """Set the weights."""
        _tree.write_(self.problem.weights, weights)

    def solve(self) -> float:
        """Train the weights by Newton's method until the gradient is at rounding level; return the validation loss.

        Conjugate gradient solves the systems, which are definite. A step that does not lower the convex training loss
        is halved, down to rounding level.
        """
        problem = self.problem
        solver = br.ConjugateGradient(max_steps=400, tolerance=1e-8)
        with problem.undisturbed() as passes:
            for _ in range(_NEWTON_STEPS):
                gradient = dict(zip(problem.weights, self.gradient(), strict=True))
                if _tree.norm(gradient) < _PRECISION:
                    break
                step = solver.solve(br.Hessian().linearise(passes, self.train), gradient).x
                before, factor = self._loss(problem.train_loss, self.train), 1.0
                self._move(step, -1.0)
                while not self._loss(problem.train_loss, self.train) <= before + 1e-12 and factor > 1e-6:
                    factor /= 2
                    self._move(step, factor)
        return self._loss(problem.val_loss, self.val)

    @torch.no_grad()
    def _loss(self, loss: Callable[..., Tensor], batch: regression.Batch) -> float:
        return loss(self.problem.model, self.problem.hyper, batch).item()

    @torch.no_grad()
    def _move(self, step: Tree, factor: float) -> None:
        for name, w in self.problem.weights.items():
            w.add_(step[name], alpha=factor)

    def gradient(self) -> Sequence[Tensor]:
        """One training gradient."""
        problem = self.problem
        loss = problem.train_loss(problem.model, problem.hyper, self.train)
        return torch.autograd.grad(loss, list(problem.weights.values()))

    def adam_after(self, steps: int) -> torch.optim.Adam:
        """Adam with its state after ``steps`` steps from the initial weights."""
        self.put(self.initial)
        weights = self.problem.weights.values()
        optimizer = torch.optim.Adam(weights, 1e-2)
        for _ in range(steps):
            for w, g in zip(weights, self.gradient(), strict=True):
                w.grad = g
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def largest_curvature(self, weights: Tree) -> float:
        """The largest eigenvalue of the training Hessian at these weights."""
        self.put(weights)
        with self.problem.undisturbed() as passes:
            matrix = dense(br.Hessian().linearise(passes, self.train), _tree.detached(self.problem.weights))
        return float(torch.linalg.eigvalsh(matrix)[-1])


def cases(table: str, data_dir: Any, classes: int, log_decay: float, seed: int) -> list[Case]:
    """Both problems in float64; the seed determines the examples and the initial weights."""
    torch.manual_seed(seed)
    digits = data.load("digits")
    ((images, labels),) = digits.draw(len(digits.x_train), seed=seed)
    chosen = (labels < classes).nonzero()[: 60 * classes, 0]
    made = []
    for name, (x, y), outputs, losses in (
        (table, data.load_table(table, data_dir), 1, regression),
        ("digits", (images[chosen].flatten(1).double(), labels[chosen]), classes, classification),
    ):
        train, val = regression.halves(x, y)
        model = nn.Linear(x.shape[1], outputs, dtype=torch.float64)
        decay = br.hyperparameters.WeightDecay(model, initial=math.exp(log_decay))
        problem = br.Problem(model, decay, losses.train_loss, losses.val_loss)
        made.append(Case(name, seed, problem, train, val, losses, _tree.copy(problem.weights)))
    return made
