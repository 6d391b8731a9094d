"""Steps of an update rule as a differentiable map, from weights and moments to those after the steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..batches import Batches, weighted
from ..curvatures.base import warn_of_unreached
from ..curvatures.power_iteration import warn_of_power_iterations
from ..errors import ArgumentError, DivergedError, NotFiniteError
from ..passes import graph
from ..passes.passes import Buffers
from ..passes.substitution import refuse_max_norm
from ..problem import Passes
from .rules import Rule, Setting
from .tuned_settings import Settings

# The changes of the tensors of a point; None for a tensor that does not change.
Tangent = list[Tensor | None]


@dataclass
class Point:
    """The point of a trajectory after some steps.

    Attributes:
        tensors: each weight, followed by the moments that the rule keeps for it.
        counts: the number of steps that have moved each weight, including earlier steps of the optimiser.
        buffers: the modules' buffers, from which the next step starts; an empty dict stands for the initial buffers.
    """

    tensors: dict[str, tuple[Tensor, ...]]
    counts: dict[str, int]
    buffers: Buffers = field(default_factory=dict)

    @property
    def weights(self) -> Tree:
        """The weights without the moments."""
        return {n: xs[0] for n, xs in self.tensors.items()}

    def flat(self) -> list[Tensor]:
        """Weights and moments in one list."""
        return [x for xs in self.tensors.values() for x in xs]

    def as_leaves(self) -> "Point":
        """The same values as new leaves."""
        tensors = {n: tuple(x.detach().requires_grad_() for x in xs) for n, xs in self.tensors.items()}
        return replace(self, tensors=tensors)

    def detached(self) -> "Point":
        """The same values, outside any graph."""
        return replace(self, tensors={n: tuple(x.detach() for x in xs) for n, xs in self.tensors.items()})

    def moved(self, rule: Rule, gradient: Tree, settings: Settings, number: int = 0) -> "Point":
        """The point after the step with this number along a gradient; weights without a gradient stay."""
        moved = {
            n: rule.step(self.tensors[n], g, self.counts[n], settings.at(number, n))
            for n, g in gradient.items()
        }
        counts = {n: count + (n in gradient) for n, count in self.counts.items()}
        return replace(self, tensors=self.tensors | moved, counts=counts)

    def towards(self, end: "Point", share: float) -> "Point":
        """The point on the straight line to ``end``, with the buffers of this one."""
        tensors = {
            n: tuple(torch.lerp(x, y, share) for x, y in zip(xs, end.tensors[n], strict=True))
            for n, xs in self.tensors.items()
        }
        counts = {n: round(count + share * (end.counts[n] - count)) for n, count in self.counts.items()}
        return Point(tensors, counts, self.buffers)


class Trajectory:
    """The steps of a rule from a problem's present weights, on one training batch or on one batch for each step.

    The moments begin as a copy of those of the weight optimiser if it matches the rule's class; else as zeros.

    Attributes:
        rule: how a step changes a weight.
        settings: the step size and the rule's settings.
        hyperparameters: the problem's, in order.
        group: the processes over which gradients are the mean.
        reached: the identities of the leaves that the training losses so far, and the settings, depend on.
    """

    def __init__(
        self, rule: Rule, step_size: Setting, steps: int, passes: Passes, batch: Any, fresh_batches: bool
    ) -> None:
        problem = passes.problem
        refuse_max_norm(problem.model, "a look-ahead")
        warn_of_power_iterations(problem)
        settings = {"step_size": step_size, **rule.settings()}
        self.settings = Settings(settings, problem.hyper, problem.weights, steps, rule.bounds)
        self.reached = set(self.settings.reached)
        self.rule, self.hyperparameters = rule, list(problem.hyperparameters.values())
        self._steps, self._passes, self._batch = steps, passes, batch
        self._pieces = _in_turn(batch) if fresh_batches else None
        self._moved: set[str] = set()
        self.group = problem.group

    def start(self, names: Iterable[str] | None = None) -> Point:
        """The present weights, or those with these names, with the initial moments."""
        whole, rule = self._passes.problem.weights, self.rule
        weights = whole if names is None else {n: whole[n] for n in names}
        known, optimizer = rule.state_of(self._passes.weight_optimizer), self._passes.weight_optimizer
        if rule.moments and not known and optimizer is not None and optimizer.state:
            self._passes.problem.warn_once(
                ("moments", type(rule)),
                f"the moments of {type(rule).__name__} begin at zero, since the weight optimiser is a "
                f"{type(optimizer).__name__}. rules.like(optimizer) makes the rule of an optimiser.",
            )
        tensors, counts = {}, {}
        for name, w in weights.items():
            state = known.get(w, {})
            begun = bool(rule.moments) and all(state.get(key) is not None for key in rule.moments)
            counts[name] = int(state.get("step", 1)) if begun else 0
            moments = [state[key] if begun else torch.zeros_like(w) for key in rule.moments]
            tensors[name] = tuple(x.detach().clone() for x in (w, *moments))
        return Point(tensors, counts)

    def run(self, point: Point, begin: int, end: int) -> Point:
        """The point after the steps from ``begin`` to below ``end``, outside any graph."""
        for number in range(begin, end):
            point = self._step(point, number, create_graph=False).detached()
        return point

    def graph(self, point: Point, begin: int, end: int) -> "Piece":
        """The same steps, with a graph."""
        first = last = point.as_leaves()
        for number in range(begin, end):
            last = self._step(last, number, create_graph=True)
        return Piece(self, begin, first, last)

    def graphs(self, point: Point, begin: int, end: int) -> "list[Piece]":
        """The same steps as one piece; with several processes as a piece a step, since each pull is a mean."""
        if not self.group.averages:
            return [self.graph(point, begin, end)]
        pieces: list[Piece] = []
        for number in range(begin, end):
            pieces.append(self.graph(point, number, number + 1))
            point = pieces[-1].end
        return pieces

    def mean(
        self, compute: Callable[[], Sequence[Tensor | None]], like: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The mean over the ranks of derivatives of steps."""
        return self.group.mean(compute, like, self._batch)

    def finish(self) -> None:
        """Raise if no step moved a weight, and name the weights that did not move."""
        self.reached = self.group.reached(self._passes.problem.live(), self.reached)
        warn_of_unreached(self._passes.problem, self._moved)

    def _step(self, point: Point, number: int, create_graph: bool) -> Point:
        if not create_graph:
            point = point.as_leaves()
        gradient = self._gradient(point, number, create_graph)
        self._moved |= gradient.keys()
        with torch.set_grad_enabled(create_graph):
            after = point.moved(self.rule, gradient, self.settings, number)
        return replace(after, buffers=self._passes.buffers())

    def _gradient(self, point: Point, number: int, create_graph: bool) -> Tree:
        """The training gradient at a point, as the mean over the ranks; its graph is that of this rank."""
        before, own = list(point.weights.values()), list[Tensor | None]()
        self._passes.carry(point.buffers)

        def found() -> list[Tensor | None]:
            loss = self._loss(point.weights, number)
            self.reached |= graph.leaves(loss, until=before)
            if create_graph:
                graph.inspect_loss(loss, until=before)
            own.extend(torch.autograd.grad(loss, before, create_graph=create_graph, allow_unused=True))
            if create_graph:
                graph.inspect_gradient([g for g in own if g is not None], until=before)
            return own

        means = self.group.mean(found, before, self._batch)
        pairs = zip(point.tensors, own, means, strict=True)
        return {n: _with_value(g, mean) for n, g, mean in pairs if mean is not None}

    def _loss(self, weights: Tree, number: int) -> Tensor:
        try:
            if self._pieces is None:
                return self._passes.train_loss(self._batch, weights)
            piece, weight = self._pieces[number % len(self._pieces)]
            with self._passes.numbered(number):
                loss = self._passes.train_loss(piece, weights)
        except NotFiniteError as error:
            if number == 0:  # the present weights, not the steps, are the cause
                raise
            raise DivergedError(
                f"the steps ahead must stay finite; step {number} of {self._steps} led to: {error} Use a smaller "
                "step_size, or fewer steps."
            ) from error
        # Over a round the mean of n c_i L_i is Σ c_i L_i.
        return loss * (weight * len(self._pieces))


class Piece:
    """The graph of some steps, from leaves to the result.

    Attributes:
        number: the number of the first step.
        end: weights and moments after the steps.
    """

    def __init__(self, path: Trajectory, number: int, begin: Point, end: Point) -> None:
        self._path, self.number, self._begin, self.end = path, number, begin, end

    def inputs(self, begin: bool = True) -> list[Tensor]:
        """The inputs of the steps: weights and moments before them, settings, hyperparameters."""
        before = self._begin.flat() if begin else []
        return [*before, *self._path.settings.leaves, *self._path.hyperparameters]

    def pull(self, cotangents: Sequence[Tensor | None], begin: bool) -> list[Tensor | None]:
        """Σ cotangent · ∂end/∂input for each of `inputs`; frees the graph."""
        pairs = [(x, c) for x, c in zip(self.end.flat(), cotangents, strict=True) if c is not None]
        outputs = {str(i): x for i, (x, _) in enumerate(pairs)}
        edges = graph.edges(outputs)
        self.end = Point({}, {})
        given = {str(i): c for i, (_, c) in enumerate(pairs)}
        inputs = self.inputs(begin)
        return self._path.mean(lambda: graph.vector_product(edges, inputs, given, retain_graph=False), inputs)

    def push(self) -> Callable[[Tangent], Tangent]:
        """The map from changes of `inputs` to changes of `end`."""
        end = self.end.flat()
        own = self._path.group.together(lambda: graph.Pushforward(end, self.inputs()))
        return lambda tangents: self._path.mean(lambda: own(tangents), end)


class _Replaced(torch.autograd.Function):
    """A tensor with another value: the mean over the ranks in place of a rank's own, whose graph it keeps."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0], None


def _with_value(own: Tensor | None, mean: Tensor) -> Tensor:
    """The mean over the ranks with the graph of this rank's own tensor, whose derivatives are averaged at the end."""
    if own is None or own is mean or not own.requires_grad:
        return mean
    replaced: Tensor = _Replaced.apply(own, mean)  # type: ignore[no-untyped-call]
    return replaced


def _in_turn(batch: Any) -> list[tuple[Any, float]]:
    if not isinstance(batch, Batches):
        raise ArgumentError(
            "fresh_batches=True needs several training batches; got one. Pass Batches([...]), or leave it out."
        )
    return weighted(batch)
