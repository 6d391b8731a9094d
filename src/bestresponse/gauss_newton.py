"""The Gauss-Newton curvature: positive semi-definite where the loss is convex in the model's outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from . import _graph
from ._tree import Tree
from .curvature import Curvature, Linearisation, reached_weights, warn_of_power_iterations
from .errors import ArgumentTypeError, EvaluationError
from .passes import Passes, checked_loss, refuse_not_finite

Predict = Callable[[Any, Any, Any], Any]
OutputLoss = Callable[[Any, Any], Tensor]
Rest = Callable[[Any, Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class GaussNewton(Curvature):
    """A = Jᵀ H J + R, with J = ∂outputs/∂w, H = ∂²loss/∂outputs² and R the exact Hessian of ``rest``.

    For train_loss = loss(predict(model, hyper, batch), batch) + rest(model, hyper, batch). Only the
    curvature is approximated: the mixed term is that of the whole training loss. A is positive
    semi-definite where loss is convex in the outputs (cross-entropy, squared error) and rest is convex
    in the weights, and equals the Hessian where predict is linear in them.

    Give ``rest`` where there is one. A module with a ``curvature_diagonal``, such as `WeightDecay`, may
    be given itself: it is called with the model, and its part of a product is one multiplication. Without
    ``rest`` it is train_loss − loss(predict(...)), under the same random state: right, at the cost of a
    Hessian product more for each product.

    Args:
        predict: (model, hyper, batch) -> outputs, a tensor or a tuple, list or dict of tensors. Where the loss
            weighs its terms by hyperparameters, they are handed on as outputs too.
        loss: (outputs, batch) -> scalar, which may not depend on the weights but through the outputs. One
            with a method ``output_hessian(outputs, batch)`` that returns the map u ↦ H u uses that, as
            `losses.CrossEntropy` does; for any other H is by autograd.
        rest: (model, hyper, batch) -> scalar, what train_loss adds to the loss of the outputs.

    Raises:
        EvaluationError: on a problem's first call, loss(predict) + rest differs from train_loss.
        SecondDerivativeError: an operation of the training loss has no second derivative.

    Reference: Schraudolph (2002); Martens (2010).
    """

    predict: Predict
    loss: OutputLoss
    rest: Rest | nn.Module | None = None

    def __post_init__(self) -> None:
        for name in ("predict", "loss"):
            if not callable(getattr(self, name)):
                raise ArgumentTypeError(
                    f"GaussNewton.{name} must be a function; got {getattr(self, name)!r}. "
                    "It takes predict(model, hyper, batch) and loss(outputs, batch)."
                )
        check_rest("GaussNewton", self.rest)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return _OuterProduct(self, passes, batch)


def check_rest(owner: str, rest: object) -> None:
    """Raise for a ``rest`` that is neither a function nor None."""
    if rest is not None and (not callable(rest) or isinstance(rest, type)):
        raise ArgumentTypeError(
            f"{owner}.rest must be a function (model, hyper, batch) -> scalar, or None; got {rest!r}."
        )


class _OuterProduct(Linearisation):
    """Jᵀ H J by two passes through one graph: Jᵀu is linear in u, so that its derivative along v is J v."""

    def __init__(self, curvature: GaussNewton, passes: Passes, batch: Any) -> None:
        problem = passes.problem
        self._hyperparameters = problem.hyperparameters
        if curvature.rest is None:
            self.detail = "rest by difference: each product costs a Hessian product more; give rest"
        passes.replay()
        outputs = curvature.predict(problem.model, problem.hyper, batch)
        self._outputs = [x for x in _tensors(outputs) if _depends(x)]
        if not self._outputs:
            raise EvaluationError(
                "the outputs of GaussNewton.predict must depend on the weights by a graph; got detached ones. "
                "Look for detach(), no_grad() or .data in it."
            )
        fitted = checked_loss("GaussNewton.loss", curvature.loss(outputs, batch))
        rest, self._rest_diagonal = _rest(curvature, passes, batch, fitted)
        whole = fitted + rest
        refuse_not_finite("train_loss", whole)
        _compare(curvature, passes, batch, whole)
        self.reached = _graph.leaves(whole)
        self.names = reached_weights(problem, self.reached)
        _graph.inspect_loss(whole)
        warn_of_power_iterations(problem)
        self._weights = [problem.weights[n] for n in self.names]

        self._weigh = _output_hessian(curvature.loss, outputs, self._outputs, batch)
        self._dummies = [torch.zeros_like(x, requires_grad=True) for x in self._outputs]
        pulled = torch.autograd.grad(
            self._outputs, self._weights, self._dummies, create_graph=True, allow_unused=True
        )
        self._pulled = self._inspected(pulled)
        # Where rest knows its diagonal, its graph is wanted for the mixed term alone, at the end.
        self._rest_loss = rest
        self._rest = self._gradient(rest) if self._rest_diagonal is None else {}
        self._fitted = self._gradient(fitted) if self._reaches_hyperparameters(fitted) else {}

    def __call__(self, v: Tree) -> Tree:
        pushed = _filled(_graph.vector_product(self._pulled, self._dummies, v, True), self._dummies)
        products = torch.autograd.grad(
            self._outputs,
            self._weights,
            self._weigh(pushed),
            retain_graph=True,
            allow_unused=True,
        )
        total = dict(zip(self.names, _filled(products, self._weights), strict=True))
        if self._rest_diagonal is not None:
            return {
                n: torch.addcmul(x, self._rest_diagonal[n], v[n]) if n in self._rest_diagonal else x
                for n, x in total.items()
            }
        if self._rest:
            more = _graph.vector_product(self._rest, self._weights, v, True)
            total = {n: x if m is None else x + m for (n, x), m in zip(total.items(), more, strict=True)}
        return total

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        inputs = list(self._hyperparameters.values())
        self._rest = self._rest or self._gradient(self._rest_loss)
        total: list[Tensor | None] = [None] * len(inputs)
        for gradient in (self._fitted, self._rest):
            part = _graph.vector_product(gradient, inputs, v, retain_graph=True)
            total = list(map(_graph.plus, total, part))
        if last:
            self._outputs, self._pulled, self._rest, self._fitted = [], {}, {}, {}
            self._rest_loss, self._weigh = torch.zeros(()), list
        return dict(zip(self._hyperparameters, total, strict=True))

    def _gradient(self, loss: Tensor) -> dict[str, GradientEdge]:
        """∂loss/∂w with a graph, for the weights that it reaches."""
        if not loss.requires_grad:
            return {}
        gradient = torch.autograd.grad(loss, self._weights, create_graph=True, allow_unused=True)
        return self._inspected(gradient)

    def _inspected(self, gradient: Sequence[Tensor | None]) -> dict[str, GradientEdge]:
        reached = {n: g for n, g in zip(self.names, gradient, strict=True) if g is not None}
        _graph.inspect_gradient(reached.values())
        return _graph.edges(reached)

    def _reaches_hyperparameters(self, loss: Tensor) -> bool:
        reached = _graph.leaves(loss)
        return any(id(p) in reached for p in self._hyperparameters.values())


def _output_hessian(
    loss: Any, outputs: Any, tensors: Sequence[Tensor], batch: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """H, the loss's own where it offers one; else by autograd, of the loss as a function of the outputs alone."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if hasattr(loss, "output_hessian"):
        own = loss.output_hessian(_refilled(outputs, iter(x.detach() for x in leaves)), batch)
        moving = [_depends(x) for x in _tensors(outputs)]
        return lambda pushed: list(compress(_tensors(own(_refilled(outputs, iter(pushed)))), moving))
    again = loss(_refilled(outputs, iter(leaves)), batch)
    slopes = torch.autograd.grad(again, leaves, create_graph=True, allow_unused=True)
    graph = _graph.edges({str(i): s for i, s in enumerate(slopes) if s is not None and s.requires_grad})

    def product(pushed: list[Tensor]) -> list[Tensor]:
        named = {i: pushed[int(i)] for i in graph}
        return _filled(_graph.vector_product(graph, leaves, named, True), leaves)

    return product


def _rest(curvature: GaussNewton, passes: Passes, batch: Any, fitted: Tensor) -> tuple[Tensor, Tree | None]:
    """The value of what is left of the training loss, and the diagonal of its Hessian where it offers one."""
    problem = passes.problem
    rest = curvature.rest
    if rest is None:
        return passes.train_loss(batch) - fitted, None
    if hasattr(rest, "curvature_diagonal"):
        diagonal = dict(rest.curvature_diagonal(problem.model))  # type: ignore[operator]
        return rest(problem.model), diagonal  # type: ignore[call-arg]
    value = rest(problem.model, problem.hyper, batch)
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=fitted.dtype), None


def _compare(curvature: GaussNewton, passes: Passes, batch: Any, whole: Tensor) -> None:
    """Raise when the parts do not make up the training loss; once for a problem and curvature."""
    if curvature.rest is None or not passes.problem.first_time(curvature):
        return
    expected, got = float(passes.train_loss(batch).detach()), float(whole.detach())
    if not abs(got - expected) <= 1e-3 * max(abs(expected), abs(got)) + 1e-6:
        raise EvaluationError(
            f"loss(predict(...)) + rest must equal train_loss; got {got:.6g} and {expected:.6g}. "
            "Give as rest what train_loss adds (a regulariser), and let predict return hyperparameters that the "
            "loss weighs its terms with as further outputs; or leave rest out."
        )


def _tensors(outputs: Any) -> list[Any]:
    """What predict returned as a list; raises where it is neither a tensor nor a collection of them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    values = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    if not isinstance(values, Sequence) or not any(isinstance(x, Tensor) for x in values):
        raise EvaluationError(
            "GaussNewton.predict must return a tensor, or a tuple, list or dict of tensors; got "
            f"{type(outputs).__name__}."
        )
    return list(values)


def _depends(output: Any) -> bool:
    """Whether an output has a derivative: others (masks, indices, constants) are handed on as they are."""
    return isinstance(output, Tensor) and output.requires_grad


def _refilled(outputs: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors where there is a derivative."""
    values = [next(tensors) if _depends(x) else x for x in _tensors(outputs)]
    if isinstance(outputs, Tensor):
        return values[0]
    if isinstance(outputs, Mapping):
        other: Any = copy(outputs)
        for key, value in zip(outputs, values, strict=True):
            other[key] = value
        return other
    return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)


def _filled(values: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if value is None else value for value, x in zip(values, like, strict=True)]
