"""Steps of an update rule, as a map that can be differentiated: from weights and moments to those after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _graph
from ._tree import Tree
from .batches import weighted
from .errors import EvaluationError
from .passes import Passes
from .rules import Rule, Setting, Value

# Each weight, and after it the moments that the rule keeps for it.
Point = dict[str, tuple[Tensor, ...]]


class Settings:
    """The step size and a rule's settings at the present hyperparameters, cut off from them.

    What a function of ``hyper`` returned is evaluated once, and stands in the steps as a leaf; `pull` and
    `push` carry derivatives from the leaves to the hyperparameters and back.

    Attributes:
        leaves: the tensors that depend on hyperparameters.
        reached: the identities of the hyperparameters that they depend on.
    """

    def __init__(
        self, settings: Mapping[str, Setting], hyper: nn.Module, weights: Mapping[str, Tensor], steps: int
    ) -> None:
        self._steps, self._weights = steps, weights
        self._outputs: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self._values = {
            name: self._read(name, setting(hyper)) if callable(setting) else setting
            for name, setting in settings.items()
        }
        self.reached = {leaf for x in self._outputs for leaf in _graph.leaves(x)}

    def at(self, step: int, weight: str) -> dict[str, Value]:
        """The settings of one weight at one step."""
        return {name: self._at(value, step, weight) for name, value in self._values.items()}

    def _at(self, value: Any, step: int, weight: str) -> Value:
        if isinstance(value, list):
            return self._at(value[step], step, weight)
        if isinstance(value, dict):
            return self._at(value[weight], step, weight)
        if isinstance(value, tuple):  # a tensor with a value for each step
            return value[0][step]  # type: ignore[no-any-return]
        return value  # type: ignore[no-any-return]

    def _read(self, name: str, value: Any, inside: bool = False) -> Any:
        if isinstance(value, Mapping) and value.keys() == self._weights.keys():
            return {weight: self._read_for(name, x, weight) for weight, x in value.items()}
        if isinstance(value, Sequence) and len(value) == self._steps and not inside:
            return [self._read(name, x, inside=True) for x in value]
        allowed = (1,) if inside else (1, self._steps)
        if not isinstance(value, Tensor) or value.ndim > 1 or value.numel() not in allowed:
            raise EvaluationError(
                f"{name} must return a scalar tensor, one of shape [{self._steps}] with a value for each step, a dict "
                f"with a tensor for each weight, or a sequence of those; got {_described(value)}."
            )
        if value.numel() == 1:
            return self._leaf(name, value.reshape(()))
        return (self._leaf(name, value),)

    def _read_for(self, name: str, value: Any, weight: str) -> Tensor:
        shape = self._weights[weight].shape
        if not isinstance(value, Tensor) or not _broadcasts(value.shape, shape):
            raise EvaluationError(
                f"{name} must return tensors that broadcast against the weights; got {_described(value)} for "
                f"{weight!r} of shape {list(shape)}."
            )
        return self._leaf(name, value)

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        inner = value.detach()
        positive = name == "step_size"
        if not bool(inner.isfinite().all()) or (positive and not bool((inner > 0).all())):
            raise EvaluationError(
                f"{name} must return {'positive and ' if positive else ''}finite values; got {_described(value)}. "
                "Tune its logarithm, or the logit of a momentum: exp() and sigmoid() stay in their bounds."
            )
        if not value.requires_grad:
            return inner
        self._outputs.append(value)
        self.leaves.append(inner.clone().requires_grad_())
        return self.leaves[-1]

    def pull(self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Derivatives with respect to the leaves, as those with respect to ``inputs``."""
        pairs = [(x, g) for x, g in zip(self._outputs, gradients, strict=True) if g is not None]
        if not pairs:
            return [None] * len(inputs)
        outputs, given = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True))

    def push(self, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The leaves' change as ``inputs`` change by ``tangents``."""
        return Pushforward(self._outputs, inputs)(tangents)


class Pushforward:
    """ẋ ↦ (∂outputs/∂inputs) ẋ, by differentiating the map u ↦ uᵀ ∂outputs/∂inputs, which is linear in u.

    So it asks for the same derivatives as reverse mode, and agrees with it to rounding.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._live = [x.requires_grad for x in outputs]
        reached = [x for x in outputs if x.requires_grad]
        self._dual = [torch.zeros_like(x, requires_grad=True) for x in reached]
        self._pulled: Sequence[Tensor | None] = [None] * len(inputs)
        if reached:
            with _graph.missing_derivatives_told():
                self._pulled = torch.autograd.grad(
                    reached, inputs, self._dual, create_graph=True, allow_unused=True
                )

    def __call__(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [
            (p, t)
            for p, t in zip(self._pulled, tangents, strict=True)
            if p is not None and p.requires_grad and t is not None
        ]
        if not pairs:
            return [None] * len(self._live)
        pulled, given = zip(*pairs, strict=True)
        with _graph.missing_derivatives_told():
            pushed = torch.autograd.grad(pulled, self._dual, given, retain_graph=True, allow_unused=True)
        through = iter(pushed)
        return [next(through) if live else None for live in self._live]


class Trajectory:
    """The steps of a rule from a problem's present weights on one training batch, or a batch a step.

    The moments begin as a copy of those of the weight optimiser, where it is of the rule's class; else as zeros.

    Attributes:
        rule: how a step changes a weight.
        settings: the step size and the rule's settings.
        hyperparameters: the problem's, in order.
        reached: the identities of the leaves that the training losses so far, and the settings, depend on.
    """

    def __init__(
        self, rule: Rule, step_size: Setting, steps: int, passes: Passes, batch: Any, fresh_batches: bool
    ) -> None:
        problem = passes.problem
        settings = {"step_size": step_size, **rule.settings()}
        self.settings = Settings(settings, problem.hyper, problem.weights, steps)
        self.reached = set(self.settings.reached)
        self.rule, self.hyperparameters = rule, list(problem.hyperparameters.values())
        self._passes, self._batch = passes, batch
        self._pieces = weighted(batch) if fresh_batches else None
        self._made: dict[str, int] = {}

    def start(self) -> Point:
        """The present weights with the moments to begin with."""
        weights = self._passes.problem.weights
        optimizer = self._passes.weight_optimizer
        known = optimizer.state if type(optimizer) is self.rule.optimizer else {}
        point = {}
        for name, w in weights.items():
            state = known.get(w, {})
            moments = [state.get(key) for key in self.rule.moments]
            begun = bool(moments) and all(m is not None for m in moments)
            self._made[name] = int(state.get("step", 1)) if begun else 0
            kept = [x.detach().clone() if begun else torch.zeros_like(w.detach()) for x in moments or ()]
            point[name] = (w.detach().clone(), *kept)
        return point

    def run(self, point: Point, begin: int, end: int) -> Point:
        """The point after the steps from ``begin`` to below ``end``, outside any graph."""
        for number in range(begin, end):
            point = detached(self._step(point, number, graph=False))
        return point

    def graph(self, point: Point, begin: int, end: int) -> "Piece":
        """The same steps, so that they can be differentiated."""
        first = last = leaves(point)
        for number in range(begin, end):
            last = self._step(last, number, graph=True)
        return Piece(self, begin, first, last)

    def _step(self, point: Point, number: int, graph: bool) -> Point:
        weights = {n: xs[0] if graph else xs[0].detach().requires_grad_() for n, xs in point.items()}
        before = list(weights.values())
        loss = self._loss(weights, number)
        if graph:
            _graph.inspect_loss(loss, until=before)
            self.reached |= _graph.leaves(loss, until=before)
        gradient = torch.autograd.grad(loss, before, create_graph=graph, allow_unused=True)
        if graph:
            _graph.inspect_gradient([g for g in gradient if g is not None], until=before)
        with torch.set_grad_enabled(graph):
            return {
                n: xs if g is None else self.update(n, xs, g, number)
                for (n, xs), g in zip(point.items(), gradient, strict=True)
            }

    def _loss(self, weights: Tree, number: int) -> Tensor:
        if self._pieces is None:
            return self._passes.train_loss(self._batch, weights)
        piece, weight = self._pieces[number % len(self._pieces)]
        with self._passes.numbered(number):
            loss = self._passes.train_loss(piece, weights)
        # Over a round the mean of n c_i L_i is Σ c_i L_i.
        return loss * (weight * len(self._pieces))

    def update(self, name: str, point: tuple[Tensor, ...], g: Tensor, number: int) -> tuple[Tensor, ...]:
        """A weight of this name and its moments after the step with this number, along the gradient ``g``."""
        w, *moments = point
        settings = self.settings.at(number, name)
        return self.rule.update(w, g, tuple(moments), self._made[name] + number, settings)


class Piece:
    """The graph of some steps, from leaves to what they became.

    Attributes:
        number: that of the first of the steps.
        end: weights and moments after the steps.
    """

    def __init__(self, path: Trajectory, number: int, begin: Point, end: Point) -> None:
        self._path, self.number, self._begin, self.end = path, number, begin, end

    def inputs(self, begin: bool = True) -> list[Tensor]:
        """What the steps depend on: weights and moments before them, settings, hyperparameters."""
        before = flat(self._begin) if begin else []
        return [*before, *self._path.settings.leaves, *self._path.hyperparameters]

    def pull(self, cotangents: Sequence[Tensor | None], begin: bool) -> list[Tensor | None]:
        """Σ cotangent · ∂end/∂input for each of `inputs`; frees the graph."""
        pairs = [(x, c) for x, c in zip(flat(self.end), cotangents, strict=True) if c is not None]
        outputs = {str(i): x for i, (x, _) in enumerate(pairs)}
        edges = _graph.edges(outputs)
        self.end = {}
        given = {str(i): c for i, (_, c) in enumerate(pairs)}
        return list(_graph.vector_product(edges, self.inputs(begin), given, retain_graph=False))

    def push(self) -> Pushforward:
        """The map from changes of `inputs` to changes of the end."""
        return Pushforward(flat(self.end), self.inputs())


def detached(point: Point) -> Point:
    """The same values, outside any graph."""
    return {n: tuple(x.detach() for x in xs) for n, xs in point.items()}


def leaves(point: Point) -> Point:
    """The same values as new leaves."""
    return {n: tuple(x.detach().requires_grad_() for x in xs) for n, xs in point.items()}


def weights_of(point: Point) -> Tree:
    """The weights of a point."""
    return {n: xs[0] for n, xs in point.items()}


def flat(point: Point) -> list[Tensor]:
    """Weights and moments in one list."""
    return [x for xs in point.values() for x in xs]


def between(start: Point, end: Point, share: float) -> Point:
    """The point on the straight line from ``start`` to ``end``."""
    return {
        n: tuple(torch.lerp(x, y, share) for x, y in zip(xs, end[n], strict=True)) for n, xs in start.items()
    }


def _broadcasts(shape: torch.Size, against: torch.Size) -> bool:
    padded = (1,) * (len(against) - len(shape)) + tuple(shape)
    return all(n in (1, m) for n, m in zip(padded, against, strict=False)) and len(padded) == len(against)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return f"{value.detach().tolist()}" if value.numel() <= 4 else f"a tensor of shape {list(value.shape)}"
