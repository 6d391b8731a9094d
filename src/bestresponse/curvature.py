"""The linearised training gradient: its products with weights and with hyperparameters.

At (w, λ) the training gradient g(w, λ) = ∂L_T/∂w has two derivatives, the curvature ∂g/∂w and the mixed
term ∂g/∂λ. Both are used as maps of one vector v over the weights: v ↦ A v and v ↦ v · ∂g/∂λ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import _graph, _tree
from ._tree import Tree
from .batches import Batches
from .errors import ArgumentError
from .forward_mode import ForwardOverReverse
from .linearisation import (
    Curvature,
    Linearisation,
    reached_weights,
    warn_of_power_iterations,
    warn_of_unreached,
)
from .passes import Passes, refuse_max_norm
from .problem import Problem
from .solvers.base import require, require_number

_KINKED = ("Relu", "Threshold", "Hardtanh", "Abs", "Clamp", "MaxPool", "MaxBackward", "LeakyRelu")


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


@dataclass(frozen=True, eq=False)
class FiniteDifference(Curvature):
    """A v ≈ (g(w + εv) − g(w − εv)) / 2ε, and the mixed term likewise: no second derivative is asked for.

    For models whose operations have none (fused attention, custom kernels). Each product costs two
    training gradients. The weights are perturbed in place and put back by copy; both sides see the
    same random state and buffers.

    The direction is normalised, and ε = step · (1 + ‖w‖). In float64 the products are right to 1e-8 to
    1e-10, in float32 to about 1e-3 on smooth networks. *On networks with kinks (ReLU, max pooling)
    a float32 difference crosses them and can be wrong by more than the product itself*: there is a
    warning, and `Hessian` or float64 to use instead.

    Args:
        step: None takes the cube root of the dtype's precision, which balances rounding and truncation.

    Raises:
        ArgumentError: weights in half precision, which rounds the perturbation away.
    """

    step: float | None = None

    twice = False

    def __post_init__(self) -> None:
        if self.step is not None:
            require_number("FiniteDifference.step", self.step)
            require(0.0 < self.step < 1.0, "FiniteDifference.step", "between 0 and 1, or None", self.step)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _Difference(passes, batch, self.step)


class _DoubleBackward(Linearisation):
    def __init__(self, passes: Passes, batch: Any) -> None:
        loss = passes.train_loss(batch)
        self.reached = _graph.leaves(loss)
        self.names = reached_weights(passes.problem, self.reached)
        self._weights = [passes.problem.weights[n] for n in self.names]
        self._hyperparameters = passes.problem.hyperparameters
        _graph.inspect_loss(loss)
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


class _Difference(Linearisation):
    def __init__(self, passes: Passes, batch: Any, step: float | None) -> None:
        self._passes, self._batch = passes, batch
        refuse_max_norm(passes.problem.model, "FiniteDifference")
        loss = passes.train_loss(batch)
        self.reached = _graph.leaves(loss)
        self.names = reached_weights(passes.problem, self.reached)
        self._weights = {n: passes.problem.weights[n] for n in self.names}
        self._hyperparameters = {
            n: p for n, p in passes.problem.hyperparameters.items() if id(p) in self.reached
        }
        coarse = [n for n, w in self._weights.items() if torch.finfo(w.dtype).bits < 32]
        if coarse:
            raise ArgumentError(
                f"FiniteDifference needs weights in float32 or float64; got half precision in {coarse[:5]}. "
                "Keep float32 weights and run the loss under torch.autocast."
            )
        _warn_of_kinks(passes.problem, loss, self._weights)
        precision = max(torch.finfo(w.dtype).eps for w in self._weights.values())
        relative = step if step is not None else precision ** (1 / 3)
        self._step = relative * (1.0 + _tree.norm(_tree.detached(self._weights)))

    def __call__(self, v: Tree) -> Tree:
        difference = self._difference(v, self._weights)
        return {n: torch.zeros_like(v[n]) if x is None else x for n, x in difference.items()}

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        return dict.fromkeys(self._passes.problem.hyperparameters) | self._difference(
            v, self._hyperparameters
        )

    def _difference(self, v: Tree, inputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """(∂L_T/∂inputs at w + εv less that at w − εv) / 2ε, with v normalised and scaled back."""
        size = _tree.norm(v)
        if size == 0.0 or not inputs:
            return {n: torch.zeros_like(x) for n, x in inputs.items()}
        ahead = self._gradient_at(self._step / size, v, inputs)
        behind = self._gradient_at(-self._step / size, v, inputs)
        factor = size / (2.0 * self._step)
        return {
            n: None if a is None or b is None else (a - b) * factor
            for n, a, b in zip(inputs, ahead, behind, strict=True)
        }

    def _gradient_at(self, step: float, v: Tree, inputs: Mapping[str, Tensor]) -> Sequence[Tensor | None]:
        kept = _tree.copy(self._weights)
        try:
            with torch.no_grad():
                for name, w in self._weights.items():
                    w.add_(v[name], alpha=step)
            loss = self._passes.train_loss(self._batch)
            return torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        finally:
            _tree.write_(self._weights, kept)


def linearise(curvature: Curvature, passes: Passes, batch: Any) -> Linearisation:
    """The linearised training gradient of one batch, or of the mean over `Batches`.

    Weights that it does not reach are named once.
    """
    if isinstance(batch, Batches):
        system: Linearisation = _Mean(curvature, passes, batch)
    else:
        system = curvature.linearise(passes, batch)
    warn_of_unreached(passes.problem, system.names)
    return system


class _Mean(Linearisation):
    """The weighted mean of the linearisations of several batches, all kept, or one at a time made anew."""

    def __init__(self, curvature: Curvature, passes: Passes, batches: Batches) -> None:
        self._curvature, self._passes, self._batches = curvature, passes, batches
        self._parts: list[Linearisation] = []
        self.reached = set()
        for number, batch in enumerate(batches):
            with passes.numbered(number):
                if batches.recompute:
                    self.reached |= _graph.leaves(passes.train_loss(batch))
                else:
                    self._parts.append(curvature.linearise(passes, batch))
                    self.reached |= self._parts[-1].reached
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


def _warn_of_kinks(problem: Problem, loss: Tensor, weights: Mapping[str, Tensor]) -> None:
    if all(w.dtype == torch.float64 for w in weights.values()):
        return
    kinks = sorted({n.name() for n in _graph.nodes([loss]) if n.name().startswith(_KINKED)})
    if kinks:
        problem.warn_once(
            "kinks",
            f"FiniteDifference needs a smooth training loss in float32; got {kinks}, whose kinks a "
            "difference crosses, so that products can be wrong by more than their size. Use Hessian, or float64.",
        )
