"""The linearised training gradient: its products with weights and with hyperparameters.

At (w, λ) the training gradient g(w, λ) = ∂L_T/∂w has two derivatives, the curvature ∂g/∂w and the mixed
term ∂g/∂λ. Both are used as maps of one vector v over the weights: v ↦ A v and v ↦ v · ∂g/∂λ.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import _graph, _tree, kinks
from ._tree import Tree
from .batches import Batches
from .errors import ArgumentError
from .forward_mode import ForwardOverReverse
from .held import without_held
from .linearisation import (
    Curvature,
    Linearisation,
    reached_weights,
    warn_of_power_iterations,
    warn_of_unreached,
)
from .passes import Passes


@dataclass(frozen=True, eq=False)
class Hessian(Curvature):
    """A = ∂²L_T/∂w², by double backward: exact, and indefinite where the loss is not convex.

    The training gradient's graph is built once; a product is one backward pass through it, and its
    memory does not grow with the number of products.

    Args:
        mode: "reverse", or "forward" for A v as the derivative of the gradient along v, by forward-mode differentiation
            of the whole backward pass: each product is a forward and a backward pass on dual numbers and keeps no
            graph for the next one. It asks for a forward-mode derivative of every operation and of its backward, and
            on a CPU costs from 1.7 to 7 products in reverse (docs/performance.md): it is a second opinion.

    Raises:
        SecondDerivativeError: an operation of the training loss has no second derivative, or none in that mode.

    Reference: Pearlmutter (1994), whose R-operator is the forward mode.
    """

    mode: Literal["reverse", "forward"] = "reverse"

    exact = True

    def __post_init__(self) -> None:
        if self.mode not in ("reverse", "forward"):
            raise ArgumentError(f'Hessian.mode must be "reverse" or "forward"; got {self.mode!r}.')

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _DoubleBackward(passes, batch) if self.mode == "reverse" else ForwardOverReverse(passes, batch)


class _DoubleBackward(Linearisation):
    def __init__(self, passes: Passes, batch: Any) -> None:
        loss = passes.train_loss(batch)
        self.reached = _graph.leaves(loss)
        self.names = reached_weights(passes.problem, self.reached)
        self._weights = [passes.problem.weights[n] for n in self.names]
        self._hyperparameters = passes.problem.hyperparameters
        _graph.inspect_loss(loss)
        self.kinks = kinks.find(passes.problem, loss)
        warn_of_power_iterations(passes.problem)
        gradient = torch.autograd.grad(loss, self._weights, create_graph=True)
        _graph.inspect_gradient(gradient)
        self._graph = _graph.edges(dict(zip(self.names, gradient, strict=True)))

    def __call__(self, v: Tree) -> Tree:
        products = _graph.vector_product(self._graph, self._weights, v, retain_graph=True)
        return {
            name: torch.zeros_like(w) if product is None else product
            for name, w, product in zip(self.names, self._weights, products, strict=True)
        }

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        inputs = list(self._hyperparameters.values())
        products = _graph.vector_product(self._graph, inputs, v, retain_graph=not last)
        if last:
            self._graph = {}
        return dict(zip(self._hyperparameters, products, strict=True))


def linearise(curvature: Curvature, passes: Passes, batch: Any) -> Linearisation:
    """The linearised training gradient of one batch, or of the mean over `Batches`.

    Weights that it does not reach are named once. Those that a kink holds are left out of its products.
    """
    if isinstance(batch, Batches):
        system: Linearisation = _Mean(curvature, passes, batch)
    else:
        system = curvature.linearise(passes, batch)
    warn_of_unreached(passes.problem, system.names)
    return without_held(system, passes.problem)


class _Mean(Linearisation):
    """The weighted mean of the linearisations of several batches, all kept, or one at a time made anew."""

    def __init__(self, curvature: Curvature, passes: Passes, batches: Batches) -> None:
        self._curvature, self._passes, self._batches = curvature, passes, batches
        self._parts: list[Linearisation] = []
        self.reached = set()
        found = []
        for number, batch in enumerate(batches):
            with passes.numbered(number):
                if batches.recompute:
                    loss = passes.train_loss(batch)
                    self.reached |= _graph.leaves(loss)
                    found.append(kinks.find(passes.problem, loss))
                else:
                    self._parts.append(curvature.linearise(passes, batch))
                    self.reached |= self._parts[-1].reached
                    found.append(self._parts[-1].kinks)
        self.kinks = kinks.mean(zip(found, batches.weights, strict=True))
        self.names = reached_weights(passes.problem, self.reached)
        self.detail = self._parts[0].detail if self._parts else ""

    def __call__(self, v: Tree) -> Tree:
        total = _tree.zeros_like(v)
        for number, weight in enumerate(self._batches.weights):
            self._add_product(total, number, weight, v)
        return total

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        count = first

        def product(v: Tree) -> Tree:
            nonlocal count
            number = count % len(self._batches)
            count += 1
            # Over a round the mean of n c_i A_i is Σ c_i A_i.
            weight = len(self._batches) * self._batches.weights[number]
            return self._add_product(_tree.zeros_like(v), number, weight, v)

        return product

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        total: dict[str, Tensor | None] = dict.fromkeys(self._passes.problem.hyperparameters)
        for number, weight in enumerate(self._batches.weights):
            with self._part(number) as part:
                products = part.mixed({name: v[name] for name in part.names}, last or self._batches.recompute)
            total = {n: _graph.plus(sofar, products[n], weight) for n, sofar in total.items()}
        if last:
            self._parts = []
        return total

    def _add_product(self, total: Tree, number: int, weight: float, v: Tree) -> Tree:
        with self._part(number) as part:
            product = part({name: v[name] for name in part.names})
        for name, x in product.items():
            total[name].add_(x, alpha=weight)
        return total

    @contextmanager
    def _part(self, number: int) -> Iterator[Linearisation]:
        with self._passes.numbered(number):
            if self._parts:
                yield self._parts[number]
            else:
                part = self._curvature.linearise(self._passes, self._batches.batches[number])
                self.detail = part.detail
                yield part
