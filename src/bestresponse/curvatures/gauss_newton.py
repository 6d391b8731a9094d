"""The Gauss-Newton curvature: positive semi-definite where the loss is convex in the model's outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._tree import Tree
from ..passes import graph
from ..passes.checkpoint import recomputed
from ..passes.unread import Unread
from ..problem import Passes
from .at_losses import AtLosses
from .base import Curvature, Linearisation, by_place
from .by_products import Derivatives, few
from .outputs import filled, output_hessian, refilled, with_graph
from .split_loss import OutputLoss, Predict, Rest, Split, SplitLinearisation, check_parts, rest_of


@dataclass(frozen=True, eq=False)
class GaussNewton(Curvature):
    """A = Jᵀ H J + R, with J = ∂outputs/∂w, H = ∂²loss/∂outputs² and R the exact Hessian of ``rest``.

    For train_loss = loss(predict(model, hyper, batch), batch) + rest(model, hyper, batch). Only the
    curvature is an approximation: the mixed term is that of the whole training loss. A is positive
    semi-definite where loss is convex in the outputs (cross-entropy, squared error) and rest is convex
    in the weights, and equals the Hessian where predict is linear in them.

    Without arguments the parts are found at work: the outputs are the arguments of the loss functions of torch that
    train_loss calls, itself or inside the model (`F.cross_entropy`, `F.mse_loss`, `F.huber_loss`,
    `F.binary_cross_entropy` with or without logits, `F.nll_loss` or `F.kl_div` of a log_softmax, and the like, also as
    modules). H then includes what train_loss does with their values, such as weights of examples; what it computes
    past them is the rest. Give the parts if the outputs go into a loss of your own, or to save time with a known
    ``rest``.

    Give ``rest`` if there is one. A module with a ``curvature_diagonal``, such as `WeightDecay`, can
    itself be ``rest``: it is called with the model, and its part of a product is one multiplication. If its own class
    also defines ``mixed_product`` and ``forward``, the mixed term uses ``mixed_product``. Without
    ``rest``, the rest is train_loss − loss(predict(...)), under the same random state. This is right, but each product
    costs one Hessian product more.

    Args:
        predict: (model, hyper, batch) -> outputs, a tensor or a tuple, list or dict of tensors, also nested. If the
            loss weighs its terms by hyperparameters, return these as outputs too.
        loss: (outputs, batch) -> scalar, which may depend on the weights only through the outputs. If it has a
            method ``output_hessian(outputs, batch)`` that returns the map u ↦ H u, as `losses.CrossEntropy` has,
            that is used; otherwise autograd computes H.
        rest: (model, hyper, batch) -> scalar, the term that train_loss adds to the loss of the outputs.

    Raises:
        EvaluationError: on a problem's first call, loss(predict) + rest differs from train_loss; the loss reads
            weights past the outputs; or, without arguments, train_loss calls no loss function of torch.
        SecondDerivativeError: an operation of the training loss has no second derivative.

    Reference: Schraudolph (2002); Martens (2010).
    """

    predict: Predict | None = None
    loss: OutputLoss | None = None
    rest: Rest | nn.Module | None = None

    def __post_init__(self) -> None:
        if self.predict is not None or self.loss is not None or self.rest is not None:
            check_parts(cast(Split, self))

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        if self.predict is None:
            return AtLosses(self, passes, batch)
        return _OuterProduct(cast(Split, self), passes, batch)


class _OuterProduct(SplitLinearisation):
    """Jᵀ H J by two passes through one graph: Jᵀu is linear in u, so that its derivative along v is J v."""

    def predict(self, curvature: Split, passes: Passes, batch: Any) -> Any:
        def again() -> Any:
            passes.replay()
            with recomputed(alone=not passes.problem.group.averages):
                return curvature.predict(passes.problem.model, passes.problem.hyper, batch)

        self._parts = curvature, passes, batch
        self._again: Callable[[], Any] = again
        self._unread = Unread()
        with self._unread.noticed():
            return again()

    def prepare(self, loss: OutputLoss, outputs: Any, moving: list[Tensor], batch: Any) -> None:
        self._outputs, self._closed = moving, hasattr(loss, "output_hessian")
        self._weigh = output_hessian(loss, outputs, moving, batch)
        self._dummies = [torch.zeros_like(x, requires_grad=True) for x in moving]
        with self._unread.left_out(graph.nodes(moving), all=True):
            pulled = torch.autograd.grad(
                moving, self.weights, self._dummies, create_graph=True, allow_unused=True
            )
        self._pulled = self.inspected(pulled)

    def needs_graph(self, fitted: Tensor) -> bool:
        """Whether the mixed term is not a part of H J v.

        It is one if the loss depends on the hyperparameters through outputs that do not depend on the weights, and the
        others do not depend on the hyperparameters: then the rows of H for the former have it.
        """
        own, weights = ({id(x) for x in xs} for xs in (self._hyperparameters.values(), self.weights))
        reached = [graph.leaves(x) for x in self._outputs]
        self._constant = [bool(leaves & own) and not leaves & weights for leaves in reached]
        apart = not any(leaves & own and leaves & weights for leaves in reached)
        self._in_rows = apart and not self._closed and not graph.leaves(fitted, until=self._outputs) & own
        return not self._in_rows and super().needs_graph(fitted)

    def outputs(self) -> list[Tensor]:
        return with_graph(self._again(), self._owner)

    def pushed(self, v: Tree) -> list[Tensor]:
        return filled(graph.vector_product(self._pulled, self._dummies, v, True), self._dummies)

    def bends(self, v: Tree) -> Tree:
        pushed = self.pushed(v)
        self._line = [(z.detach().clone(), u) for z, u in zip(self._outputs, pushed, strict=True)]
        rest = self.with_rest({n: torch.zeros_like(w) for n, w in v.items()}, v)
        return by_place([] if self._closed else self._weigh(pushed), rest)

    def slopes(self, t: float) -> Tree:
        curvature, passes, batch = self._parts
        outputs = self._again()
        moved = [(z + t * u).requires_grad_() for z, u in self._line]
        fitted = curvature.loss(refilled(outputs, moved), batch)
        found: Sequence[Tensor | None] = []
        if not self._closed:
            found = torch.autograd.grad(fitted, moved, allow_unused=True)
        if curvature.rest is None:
            fitted = curvature.loss(outputs, batch)
        rest = rest_of(curvature, passes, batch, fitted)[0]
        past: Sequence[Tensor | None] = [None] * len(self.weights)
        if rest.requires_grad:
            past = torch.autograd.grad(rest, self.weights, allow_unused=True)
        return by_place(
            filled(found, moved[: len(found)]),
            dict(zip(self.names, filled(past, self.weights), strict=True)),
        )

    def outer(self, v: Tree) -> Tree:
        return self._pulled_back(self._weigh(self.pushed(v)))

    def with_mixed(self, v: Tree) -> tuple[Tree, Derivatives] | None:
        if not (self._in_rows and any(self._constant) and few(self._hyperparameters.values(), self.weights)):
            return None
        if not self.rest_is_small(self._outputs):
            return None
        weighed = self._weigh(self.pushed(v))
        inputs: list[Tensor] = list(self._hyperparameters.values())
        mixed = map(graph.plus, self._rows(weighed, inputs), self.mixed_rest(v, inputs))
        return self.with_rest(self._pulled_back(weighed), v), dict(
            zip(self._hyperparameters, mixed, strict=True)
        )

    def mixed_fitted(self, v: Tree, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        if not self._in_rows:
            return super().mixed_fitted(v, inputs)
        return (
            self._rows(self._weigh(self.pushed(v)), inputs) if any(self._constant) else [None] * len(inputs)
        )

    def _rows(self, weighed: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """The rows of H J v for the outputs that do not depend on the weights, pulled back to the hyperparameters."""
        constant, rows = (list(compress(xs, self._constant)) for xs in (self._outputs, weighed))
        return torch.autograd.grad(constant, inputs, rows, retain_graph=True, allow_unused=True)

    def _pulled_back(self, weighed: list[Tensor]) -> Tree:
        """Jᵀ u."""
        products = torch.autograd.grad(
            self._outputs, self.weights, weighed, retain_graph=True, allow_unused=True
        )
        return dict(zip(self.names, filled(products, self.weights), strict=True))

    def free(self) -> None:
        self._outputs, self._pulled, self._weigh = [], {}, list
