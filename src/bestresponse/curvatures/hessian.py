"""The linearised training gradient: its products with weights and with hyperparameters.

At (w, λ) the training gradient g(w, λ) = ∂L_T/∂w has two derivatives, the curvature ∂g/∂w and the mixed
term ∂g/∂λ. Both are used as maps of one vector v over the weights: v ↦ A v and v ↦ v · ∂g/∂λ.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..passes import graph
from ..passes.checkpoint import recomputed
from ..passes.unread import Unread
from ..problem import Passes
from . import kinks
from .base import Curvature, Linearisation, reached_weights
from .by_products import shares_its_pass
from .outputs import filled
from .power_iteration import warn_of_power_iterations


@dataclass(frozen=True, eq=False)
class Hessian(Curvature):
    """A = ∂²L_T/∂w², by double backward: exact, and indefinite where the loss is not convex.

    The training gradient's graph is built once. A product is one backward pass through it, and
    memory does not grow with the number of products.

    Raises:
        SecondDerivativeError: an operation of the training loss has no second derivative.

    Reference: Pearlmutter (1994).
    """

    exact = True

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _DoubleBackward(passes, batch)


class _DoubleBackward(Linearisation):
    def __init__(self, passes: Passes, batch: Any) -> None:
        unread = Unread()
        with recomputed(alone=not passes.problem.group.averages), unread.noticed():
            loss = passes.train_loss(batch)
        nodes = list(graph.nodes([loss]))
        self.reached = graph.leaves_among(nodes, loss)
        self.names = reached_weights(passes.problem, self.reached)
        self._weights = [passes.problem.weights[n] for n in self.names]
        self._hyperparameters = passes.problem.hyperparameters
        graph.inspect_nodes(nodes)
        self.kinks = kinks.of_loss(passes.problem, loss, nodes)
        warn_of_power_iterations(passes.problem)
        with unread.left_out(nodes):
            gradient = torch.autograd.grad(loss, self._weights, create_graph=True)
        graph.inspect_gradient(gradient)
        self._graph = graph.edges(dict(zip(self.names, gradient, strict=True)))
        others = list(self._hyperparameters.values())
        self._shares = shares_its_pass(passes.problem, self._graph, self._weights, others)

    def __call__(self, v: Tree) -> Tree:
        products = graph.vector_product(self._graph, self._weights, v, retain_graph=True)
        return dict(zip(self.names, filled(products, self._weights), strict=True))

    def with_mixed(self, v: Tree) -> tuple[Tree, dict[str, Tensor | None]] | None:
        if not self._shares:
            return None
        inputs, count = [*self._weights, *self._hyperparameters.values()], len(self._weights)
        found = graph.vector_product(self._graph, inputs, v, retain_graph=True)
        product = dict(zip(self.names, filled(found[:count], self._weights), strict=True))
        return product, dict(zip(self._hyperparameters, found[count:], strict=True))

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        inputs = list(self._hyperparameters.values())
        products = graph.vector_product(self._graph, inputs, v, retain_graph=not last)
        if last:
            self._graph = {}
        return dict(zip(self._hyperparameters, products, strict=True))
