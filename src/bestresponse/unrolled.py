"""Differentiation through optimisation: the hypergradient of a few steps of gradient descent."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _graph, _tree
from ._tree import Tree
from .errors import EvaluationError
from .implicit import Method, combine, refuse_unreached, validation_gradient
from .passes import Passes
from .result import Hypergradient
from .solvers.base import require, require_integer, require_number


@dataclass(frozen=True, eq=False)
class Unrolled(Method):
    """Look K steps of gradient descent ahead, and differentiate the validation loss through them.

        w_{k+1} = w_k − α ∂L_T/∂w(w_k, λ),  w_0 the present weights;  the result is dL_V(w_K, λ)/dλ

    The steps are made on copies: nothing is written back. ``val_loss`` and ``direct`` of the result
    are at w_K. Every step uses the same batch and the same random state. At a stationary point of the
    training loss the result is that of ``Implicit(Neumann(terms=K - 1, scale=α))``.

    Args:
        steps: K ≥ 1. Memory grows with the steps that are differentiated.
        step_size: α > 0; or a function of the module ``hyper`` that returns it as a scalar tensor, so that it
            can be tuned too, as in ``lambda hyper: hyper.log_rate.exp()``.
        last: differentiate the last ``last`` steps only (truncated unrolling); None means all.

    Raises:
        ArgumentError: an argument out of its range.
        EvaluationError: a loss uses an original weight beside the argument ``model``.

    Reference: Domke (2012); Maclaurin, Duvenaud and Adams (2015); truncated, Shaban et al. (2018).
    """

    steps: int
    step_size: float | Callable[[Any], Tensor]
    last: int | None = None

    def __post_init__(self) -> None:
        require_integer("Unrolled.steps", self.steps, 1)
        if not callable(self.step_size):
            require_number("Unrolled.step_size", self.step_size)
            require(
                0 < self.step_size < math.inf, "Unrolled.step_size", "positive and finite", self.step_size
            )
        if self.last is not None:
            require_integer("Unrolled.last", self.last, 1)
            required = f"at most steps={self.steps}, or None"
            require(self.last <= self.steps, "Unrolled.last", required, self.last)

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        differentiated = self.steps if self.last is None else self.last
        rate = self._rate(problem.hyper)
        weights = _copies(problem.weights)
        for _ in range(self.steps - differentiated):
            weights = _copies(_step(passes, train_batch, weights, rate, graph=False)[0])
        reached = _graph.leaves(rate) if isinstance(rate, Tensor) else set()
        for _ in range(differentiated):
            weights, leaves = _step(passes, train_batch, weights, rate, graph=True)
            reached |= leaves
        val_loss, val_gradient, direct = validation_gradient(passes, val_batch, _copies(weights))
        refuse_unreached(problem, direct, reached)
        inputs = list(problem.hyperparameters.values())
        through = _graph.vector_product(_graph.edges(weights), inputs, val_gradient, retain_graph=False)
        indirect = dict(zip(problem.hyperparameters, through, strict=True))
        return combine(problem, val_loss, direct, indirect)

    def _rate(self, hyper: nn.Module) -> float | Tensor:
        if not callable(self.step_size):
            return self.step_size
        rate = self.step_size(hyper)
        if not isinstance(rate, Tensor) or rate.numel() != 1 or not 0 < float(rate.detach()) < math.inf:
            raise EvaluationError(
                f"Unrolled.step_size must return a positive scalar tensor; got {rate!r}. Tune its logarithm: exp() "
                "of that is positive."
            )
        return rate.reshape(())


def _step(
    passes: Passes, batch: Any, weights: Tree, rate: float | Tensor, graph: bool
) -> tuple[Tree, set[int]]:
    """The weights after one step, and the leaves that its loss reaches."""
    before = list(weights.values())
    loss = passes.train_loss(batch, weights)
    if graph:
        _graph.inspect_loss(loss, until=before)
    gradient = torch.autograd.grad(loss, before, create_graph=graph, allow_unused=True)
    if graph:
        _graph.inspect_gradient([g for g in gradient if g is not None], until=before)
    after = {
        name: w if g is None else w - rate * g for (name, w), g in zip(weights.items(), gradient, strict=True)
    }
    return after, _graph.leaves(loss, until=before)


def _copies(weights: dict[str, Any]) -> Tree:
    """The same values as new leaves."""
    return {name: w.requires_grad_() for name, w in _tree.copy(weights).items()}
