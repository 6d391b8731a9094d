"""The common part of curvatures of a training loss that is a loss of outputs plus a rest."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._tree import Tree
from ..errors import ArgumentTypeError, EvaluationError, named, require_parameters
from ..hyperparameters.protocol import (
    KnownCurvature,
    diagonal_of,
    knows_its_curvature,
    knows_its_mixed_term,
    mixed_products,
)
from ..passes import graph
from ..passes.checked_loss import checked_loss, refuse_not_finite
from ..problem import Passes
from . import kinks
from .base import Linearisation, reached_weights
from .outputs import refilled, with_graph
from .power_iteration import warn_of_power_iterations

Predict = Callable[[Any, Any, Any], Any]
OutputLoss = Callable[[Any, Any], Tensor]
Rest = Callable[[Any, Any, Any], Tensor | float]
# A rest is small if the graph of the outputs has so many times its nodes.
_SMALL = 8


class Split(Protocol):
    """train_loss = loss(predict(model, hyper, batch), batch) + rest(model, hyper, batch)."""

    @property
    def predict(self) -> Predict: ...
    @property
    def loss(self) -> OutputLoss: ...
    @property
    def rest(self) -> Rest | nn.Module | None: ...


def check_parts(curvature: Split) -> None:
    """Raise unless ``predict`` and ``loss`` are functions and ``rest`` is a function or None."""
    owner = type(curvature).__name__
    for name in ("predict", "loss"):
        if not callable(getattr(curvature, name)):
            raise ArgumentTypeError(
                f"{owner}.{name} must be a function; got {getattr(curvature, name)!r}. "
                "It takes predict(model, hyper, batch) and loss(outputs, batch)."
            )
    require_parameters(f"{owner}.predict", curvature.predict, "model, hyper, batch")
    require_parameters(f"{owner}.loss", curvature.loss, "outputs, batch")
    check_rest(owner, curvature.rest)


def check_rest(owner: str, rest: object) -> None:
    """Raise unless ``rest`` is a function or None."""
    if rest is not None and (not callable(rest) or isinstance(rest, type)):
        raise ArgumentTypeError(
            f"{owner}.rest must be a function (model, hyper, batch) -> scalar, or None; got {rest!r}."
        )
    if callable(rest) and not isinstance(rest, KnownCurvature):  # which is called with the model alone
        require_parameters(f"{owner}.rest", rest, "model, hyper, batch")


class SplitLinearisation(Linearisation):
    """A = C + R, where C represents the Hessian of the loss of the outputs, and R is the exact Hessian of the rest.

    A subclass makes C from the outputs in `prepare`, and multiplies with it in `outer`.
    """

    def __init__(self, curvature: Split, passes: Passes, batch: Any) -> None:
        problem = passes.problem
        self._owner = type(curvature).__name__
        self._hyperparameters, self._model = problem.hyperparameters, problem.model
        self._term, self._sharded = curvature.rest, problem.group.sharded
        if curvature.rest is None:
            self.detail = "rest by difference: each product costs one Hessian product more; give rest"
        passes.replay()
        with passes.unmoved(f"{self._owner}.predict, .loss or .rest", batch):
            outputs = self.predict(curvature, passes, batch)
            # A copy of a parameter that is itself an output ends the search for leaves besides the outputs.
            moving = [x.view_as(x) if x.is_leaf else x for x in with_graph(outputs, self._owner)]
            outputs = refilled(outputs, moving)
            fitted = checked_loss(f"{self._owner}.loss", curvature.loss(outputs, batch))
            self._refuse_other_paths(passes.problem.weights, fitted, moving)
            rest, self._rest_diagonal = rest_of(curvature, passes, batch, fitted)
        whole = problem.group.joined(fitted + rest)
        refuse_not_finite("train_loss", whole)
        _compare(curvature, passes, batch, whole)
        nodes = list(graph.nodes([whole]))
        self.reached = graph.leaves_among(nodes, whole)
        self.names = reached_weights(problem, self.reached)
        graph.inspect_nodes(nodes)
        self.kinks = kinks.of_loss(problem, whole, nodes)
        warn_of_power_iterations(problem)
        self.weights = [problem.weights[n] for n in self.names]
        self.prepare(curvature.loss, outputs, moving, batch)
        # If rest knows its diagonal, its graph is needed only for the mixed term, at the end.
        self._rest_loss = rest
        self._rest = self._gradient(rest) if self._rest_diagonal is None else {}
        self._fitted = self._gradient(fitted) if self.needs_graph(fitted) else {}

    def _refuse_other_paths(
        self, weights: Mapping[str, Tensor], fitted: Tensor, moving: list[Tensor]
    ) -> None:
        """Raise if the loss of the outputs reads weights past the outputs, whose curvature would be left out."""
        past = graph.leaves(fitted, until=moving)
        if read := [n for n, w in weights.items() if id(w) in past]:
            raise EvaluationError(
                f"{self._owner}.loss must depend on the weights through the outputs of predict alone; it also reads "
                f"{named(read)}, whose curvature would be left out. Let predict return what the loss needs, as tensors "
                "in tuples, lists or dicts; put a penalty of weights into rest."
            )

    def predict(self, curvature: Split, passes: Passes, batch: Any) -> Any:
        """The outputs."""
        return curvature.predict(passes.problem.model, passes.problem.hyper, batch)

    @abstractmethod
    def prepare(self, loss: OutputLoss, outputs: Any, moving: list[Tensor], batch: Any) -> None:
        """Make C; ``moving`` are the tensors among the outputs that have a derivative."""

    @abstractmethod
    def outer(self, v: Tree) -> Tree:
        """C v, in newly allocated tensors."""

    def free(self) -> None:
        """Free the memory that the products needed; the last call of `mixed` calls this."""

    def __call__(self, v: Tree) -> Tree:
        return self.with_rest(self.outer(v), v)

    def with_rest(self, total: Tree, v: Tree) -> Tree:
        """C v + R v from C v."""
        if self._rest_diagonal is not None:
            return {
                n: torch.addcmul(x, self._rest_diagonal[n], v[n]) if n in self._rest_diagonal else x
                for n, x in total.items()
            }
        if self._rest:
            more = graph.vector_product(self._rest, self.weights, v, True)
            total = {n: x if m is None else x + m for (n, x), m in zip(total.items(), more, strict=True)}
        return total

    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        inputs: list[Tensor] = list(self._hyperparameters.values())
        total = map(graph.plus, self.mixed_fitted(v, inputs), self.mixed_rest(v, inputs))
        if last:
            self._rest, self._fitted, self._rest_loss = {}, {}, torch.zeros(())
            self.free()
        return dict(zip(self._hyperparameters, total, strict=True))

    def mixed_fitted(self, v: Tree, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """The part of the loss of the outputs."""
        return graph.vector_product(self._fitted, inputs, v, retain_graph=True)

    def mixed_rest(self, v: Tree, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """The rest's part, from the module if the module knows it."""
        named = (
            self._term.named_parameters(remove_duplicate=False) if isinstance(self._term, nn.Module) else ()
        )
        if (rates := dict(named)) and knows_its_mixed_term(self._term) and not self._sharded:
            known = mixed_products(self._term, rates, self._model, v)
            return [known.get(id(p)) for p in inputs]
        self._rest = self._rest or self._gradient(self._rest_loss)
        return graph.vector_product(self._rest, inputs, v, retain_graph=True)

    def rest_is_small(self, outputs: list[Tensor]) -> bool:
        """Whether the rest's part of the mixed term costs little compared with a pass through the outputs' graph."""
        own, others = (sum(1 for _ in graph.nodes(xs)) for xs in ([self._rest_loss], outputs))
        known = isinstance(self._term, nn.Module) and knows_its_mixed_term(self._term)
        return known or _SMALL * own <= others

    def inspected(self, gradient: Sequence[Tensor | None]) -> dict[str, GradientEdge]:
        """The nodes where the graph of a gradient begins, for the weights that it reaches."""
        reached = {n: g for n, g in zip(self.names, gradient, strict=True) if g is not None}
        graph.inspect_gradient(reached.values())
        return graph.edges(reached)

    def _gradient(self, loss: Tensor) -> dict[str, GradientEdge]:
        """∂loss/∂w with a graph, for the weights that it reaches."""
        if not loss.requires_grad:
            return {}
        gradient = torch.autograd.grad(loss, self.weights, create_graph=True, allow_unused=True)
        return self.inspected(gradient)

    def needs_graph(self, fitted: Tensor) -> bool:
        """Whether the mixed term of the loss of the outputs needs the graph of its gradient."""
        reached = graph.leaves(fitted)
        return any(id(p) in reached for p in self._hyperparameters.values())


def rest_of(curvature: Split, passes: Passes, batch: Any, fitted: Tensor) -> tuple[Tensor, Tree | None]:
    """The value of the rest of the training loss, and the diagonal of its Hessian if it provides one."""
    problem = passes.problem
    rest = curvature.rest
    if rest is None:
        return passes.train_loss(batch) - fitted, None
    if isinstance(rest, KnownCurvature):
        known = knows_its_curvature(rest) and not problem.group.sharded
        diagonal = diagonal_of(rest, problem.model) if known else None
        return rest(problem.model), diagonal
    value = rest(problem.model, problem.hyper, batch)
    if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
        raise EvaluationError(
            f"{type(curvature).__name__}.rest must return a scalar tensor or a number; got {value!r}."
        )
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=fitted.dtype), None


def _compare(curvature: Split, passes: Passes, batch: Any, whole: Tensor) -> None:
    """Raise if the parts do not add up to the training loss; checked once for a problem and curvature."""
    if curvature.rest is None or passes.problem.has_checked(curvature):
        return
    expected, got = float(passes.train_loss(batch).detach()), float(whole.detach())
    if not abs(got - expected) <= 1e-3 * max(abs(expected), abs(got)) + 1e-6:
        raise EvaluationError(
            f"loss(predict(...)) + rest must equal train_loss; got {got:.6g} and {expected:.6g}. "
            "Give as rest the term that train_loss adds (a regulariser), and let predict return hyperparameters that "
            "weigh terms of the loss as further outputs; or leave rest out."
        )
    passes.problem.checked(curvature)
