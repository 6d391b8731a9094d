"""Differentiation through optimisation: the hypergradient of a few steps of an update rule."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from . import _graph, _tree
from ._reach import refuse_unreached
from ._tree import Tree
from .claims import Value
from .errors import ArgumentError, ArgumentTypeError, DivergedError, NotFiniteError
from .method import Method, combine, validation_gradient
from .passes import Buffers, Passes
from .problem import settings_of
from .result import Hypergradient
from .rules import SGD, Rule, Setting
from .running_statistics import Reading
from .solvers.base import require, require_integer, require_number
from .trajectory import Piece, Point, Trajectory
from .verification import Claim

# The changes of the tensors of a point; None where it does not change.
Tangent = list[Tensor | None]

# Steps that a verification makes again.
_VERIFIED = 2


@dataclass(frozen=True, eq=False)
class _ThroughSteps(Method):
    """What reverse and forward mode have in common: the steps ahead."""

    steps: int
    step_size: Setting

    def _check(self, rule: object, fresh_batches: object) -> None:
        name = type(self).__name__
        require_integer(f"{name}.steps", self.steps, 1)
        if not isinstance(fresh_batches, bool):
            raise ArgumentTypeError(f"{name}.fresh_batches must be True or False; got {fresh_batches!r}.")
        if isinstance(self.step_size, Tensor):
            raise ArgumentTypeError(
                f"{name}.step_size must be a number, or a function of hyper that returns a tensor, as in lambda hyper: "
                "hyper.log_rate.exp(); got a tensor."
            )
        if not callable(self.step_size):
            require_number(f"{name}.step_size", self.step_size)
            require(0 < self.step_size < math.inf, f"{name}.step_size", "positive and finite", self.step_size)
        if not isinstance(rule, Rule):
            raise ArgumentTypeError(
                f"{name}.rule must be an update rule, such as rules.Adam(); got {rule!r}. rules.like(optimizer) "
                "makes that of a torch optimiser."
            )


@dataclass(frozen=True, eq=False)
class Unrolled(_ThroughSteps):
    """Look K steps of an optimiser ahead, and differentiate the validation loss through them.

        w_{k+1} = w_k − α ∂L_T/∂w(w_k, λ),  w_0 the present weights;  the result is dL_V(w_K, λ)/dλ

    The steps are made on copies: nothing is written back. ``val_loss`` and ``direct`` of the result
    are at w_K, with the buffers that the steps left. Running statistics that the validation loss reads follow
    w_K and λ, as those of the training batch do; other buffers are constants. Every step sees the same random
    state. At a stationary point of the training loss the result is that of
    ``Implicit(Neumann(terms=K - 1, scale=α))``.

    Settings of the optimiser are tuned by functions of the module ``hyper``, as in
    ``Unrolled(20, lambda hyper: hyper.log_rate.exp(), rule=rules.SGD(momentum=lambda hyper: hyper.logit.sigmoid()))``.
    Such a function returns a scalar tensor, one of shape [steps] with a value for each step, a dict by weight
    with tensors that broadcast against the weights, or a sequence of ``steps`` scalars or dicts.

    Args:
        steps: K ≥ 1.
        step_size: α > 0, or a function of ``hyper``.
        last: differentiate the last ``last`` steps only (truncated unrolling); None means all.
        rule: the optimiser's steps. Its moments begin as a copy of those of the weight optimiser (the tuner's,
            or ``hypergradient(..., weight_optimizer=...)``) where that is of the rule's class, and else as zeros.
        checkpoint_every: keep weights and moments every so many steps, and make the steps between them again
            when they are differentiated: K / checkpoint_every copies and checkpoint_every graphs in memory in
            place of K graphs, for one training gradient more a step. About √K needs least.
        trajectory: "exact"; or "interpolated", which keeps the first and last point alone, and differentiates
            the steps at points on the straight line between them (DrMAD). It is exact where the weights (and
            moments) move on a straight line with constant speed.
        fresh_batches: whether each step takes the next of several `Batches` (and dropout masks of its own), or
            all of them together.

    Raises:
        ArgumentError: an argument out of its range.
        EvaluationError: a loss uses an original weight beside the argument ``model``; or a function of ``hyper``
            returns something else.

    Reference: Domke (2012); Maclaurin, Duvenaud and Adams (2015); truncated, Shaban et al. (2018); DrMAD, Fu et
    al. (2016); recomputation, Griewank and Walther (2000).
    """

    last: int | None = None
    rule: Rule = SGD()
    checkpoint_every: int | None = None
    trajectory: Literal["exact", "interpolated"] = "exact"
    fresh_batches: bool = False

    def __post_init__(self) -> None:
        self._check(self.rule, self.fresh_batches)
        for name in ("last", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None:
                require_integer(f"Unrolled.{name}", value, 1)
        if self.last is not None:
            required = f"at most steps={self.steps}, or None"
            require(self.last <= self.steps, "Unrolled.last", required, self.last)
        if self.trajectory not in ("exact", "interpolated"):
            raise ArgumentError(
                f'Unrolled.trajectory must be "exact" or "interpolated"; got {self.trajectory!r}.'
            )
        if self.trajectory == "interpolated" and self.checkpoint_every is not None:
            raise ArgumentError(
                'Unrolled keeps no checkpoints with trajectory="interpolated"; got checkpoint_every='
                f"{self.checkpoint_every}. Leave one of them out."
            )

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        path = Trajectory(self.rule, self.step_size, self.steps, passes, train_batch, self.fresh_batches)
        first = 0 if self.last is None else self.steps - self.last
        start = path.run(path.start(), 0, first)
        end, pieces = (self._exact if self.trajectory == "exact" else self._interpolated)(path, start, first)
        read = Reading(passes, train_batch)
        val_loss, val_gradient, direct = _at_the_end(passes, val_batch, end, read)
        del start, end
        indirect = _through(path, pieces, val_gradient, first)
        path.finish()
        refuse_unreached(problem, direct, path.reached)
        result = combine(problem, val_loss, direct, dict(zip(problem.hyperparameters, indirect, strict=True)))
        return replace(result, norms=read.norms)

    def claim(self) -> Claim:
        # Of all that is differentiated: the last steps, or steps between which a line is exact.
        short = replace(self, last=None, checkpoint_every=None, trajectory="exact", fresh_batches=False)
        return _claim(self, short)

    def _exact(self, path: Trajectory, start: Point, first: int) -> tuple[Point, Iterator[Piece]]:
        """The last point, and the graphs of the steps from the last to the first, between the points that are kept."""
        size = self.checkpoint_every or self.steps
        begins = range(first, self.steps, size)
        points = [start]
        for begin in begins[:-1]:
            points.append(path.run(points[-1], begin, begin + size))
        last = path.graph(points.pop(), begins[-1], self.steps)

        def pieces() -> Iterator[Piece]:
            yield last
            for begin in reversed(begins[:-1]):
                yield path.graph(points.pop(), begin, begin + size)

        return last.end, pieces()

    def _interpolated(self, path: Trajectory, start: Point, first: int) -> tuple[Point, Iterator[Piece]]:
        """The same, with each step at a point between the first and the last."""
        end = path.run(start, first, self.steps)
        length = self.steps - first
        points = ((k, start.towards(end, (k - first) / length)) for k in reversed(range(first, self.steps)))
        return end, (path.graph(point, k, k + 1) for k, point in points)


def _at_the_end(
    passes: Passes, val_batch: Any, end: Point, read: Reading
) -> tuple[float, Tree, dict[str, Tensor | None]]:
    """The validation loss and its gradients at the last point, with the buffers that the steps left."""
    passes.carry(end.buffers)
    try:
        return validation_gradient(passes, val_batch, read, end.leaves().weights)
    except NotFiniteError as error:
        raise DivergedError(
            f"the steps ahead must stay finite; got, at their end: {error} Use a smaller step_size, or fewer steps."
        ) from error


def _through(
    path: Trajectory, pieces: Iterator[Piece], val_gradient: Tree, first: int
) -> list[Tensor | None]:
    """∂L_V(w_K)/∂λ through the steps, by hyperparameter: reverse mode."""
    hyperparameters = path.hyperparameters
    kept = len(path.rule.moments)
    cotangents = [x for g in val_gradient.values() for x in (g, *[None] * kept)]
    total: list[Tensor | None] = [None] * (len(path.settings.leaves) + len(hyperparameters))
    for piece in pieces:
        pulled = piece.pull(cotangents, begin=piece.number > first)
        of_point = len(pulled) - len(total)
        cotangents = pulled[:of_point]
        total = [_graph.plus(sofar, x) for sofar, x in zip(total, pulled[of_point:], strict=True)]
    of_settings, of_hyperparameters = total[: -len(hyperparameters)], total[-len(hyperparameters) :]
    through_settings = path.settings.pull(of_settings, hyperparameters)
    return [_graph.plus(a, b) for a, b in zip(of_hyperparameters, through_settings, strict=True)]


@dataclass(frozen=True, eq=False)
class Forward(_ThroughSteps):
    """The hypergradient of `Unrolled` in forward mode, which carries ∂w/∂λ along the steps.

        Z_{k+1} = (∂w_{k+1}/∂w_k) Z_k + ∂w_{k+1}/∂λ,  Z_0 = 0;   dL_V/dλ = ∂L_V/∂λ + ∂L_V/∂w(w_K) Z_K

    Memory does not grow with the steps, but with the hyperparameters; so does time. It is for few of them and
    many steps. The result is that of ``Unrolled`` to rounding. It asks for third derivatives, which torch's batch
    norm has no longer from 2.14 on.

    Args:
        steps: K ≥ 1.
        step_size: α > 0, or a function of ``hyper``, as for `Unrolled`.
        rule: the optimiser's steps, as for `Unrolled`.
        chunk: how many hyperparameters are carried at a time, each with a copy of weights and moments; None all.
            The steps are made anew for each chunk.
        fresh_batches: whether each step takes the next of several `Batches`, or all of them together.

    Raises:
        ArgumentError: an argument out of its range.
        EvaluationError: as for `Unrolled`.

    Reference: Franceschi, Donini, Frasconi and Pontil (2017).
    """

    rule: Rule = SGD()
    chunk: int | None = None
    fresh_batches: bool = False

    def __post_init__(self) -> None:
        self._check(self.rule, self.fresh_batches)
        if self.chunk is not None:
            require_integer("Forward.chunk", self.chunk, 1)

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        path = Trajectory(self.rule, self.step_size, self.steps, passes, train_batch, self.fresh_batches)
        number = _tree.size(problem.hyperparameters)
        size = min(self.chunk or number, number)
        entries: list[float | None] = []
        val_loss, val_gradient, direct = 0.0, Tree(), dict[str, Tensor | None]()
        read = Reading(passes, train_batch)
        for begin in range(0, max(number, 1), max(size, 1)):
            end, tangents = _carried(path, range(begin, min(begin + size, number)), self.steps)
            if not val_gradient:
                val_loss, val_gradient, direct = _at_the_end(passes, val_batch, end, read)
            entries += [_along(val_gradient, t) for t in tangents]
        path.finish()
        refuse_unreached(problem, direct, path.reached)
        result = combine(problem, val_loss, direct, _by_name(entries, problem.hyperparameters))
        return replace(result, norms=read.norms)

    def claim(self) -> Claim:
        return _claim(self, replace(self, fresh_batches=False))


def _claim(method: Unrolled | Forward, short: Unrolled | Forward) -> Claim:
    """L_V(w_K(λ), λ), after few steps where their settings are numbers."""
    settings = (method.step_size, *method.rule.settings().values())
    if not any(map(callable, settings)):
        short = replace(short, steps=min(method.steps, _VERIFIED))

    kept: Buffers = {}

    def end(passes: Passes, train: Any) -> Point:
        path = Trajectory(short.rule, short.step_size, short.steps, passes, train, False)
        return path.run(path.start(), 0, short.steps)

    def loss(passes: Passes, val: Any, point: Point, buffers: Buffers) -> float:
        passes.carry(buffers)
        try:
            return float(passes.val_loss(val, point.leaves().weights).detach())
        finally:
            passes.carry({})

    def total(passes: Passes, train: Any, val: Any) -> dict[str, Tensor]:
        kept.clear()
        kept.update(end(passes, train).buffers)
        try:
            return short.differentiate(passes, train, val).total
        finally:
            passes.carry({})

    def again(passes: Passes, train: Any, val: Any) -> float:
        return loss(passes, val, end(passes, train), kept)

    return Value(type(method), settings_of(method), total, again, True)


def _carried(path: Trajectory, entries: range, steps: int) -> tuple[Point, list[Tangent]]:
    """The last point, and for each of these entries of λ the change of that point as the entry changes."""
    units = [_unit(path.hyperparameters, entry) for entry in entries]
    changes = [[*path.settings.push(path.hyperparameters, unit), *unit] for unit in units]
    point = path.start()
    tangents: list[Tangent] = [[None] * len(point.flat()) for _ in entries]
    for number in range(steps):
        piece = path.graph(point, number, number + 1)
        push = piece.push()
        tangents = [push([*t, *change]) for t, change in zip(tangents, changes, strict=True)]
        point = piece.end.detached()
    return point, tangents


def _unit(tensors: Sequence[Tensor], entry: int) -> Tangent:
    """A change of one entry of all tensors by one; None for the tensors that it is not in."""
    unit: Tangent = [None] * len(tensors)
    for index, x in enumerate(tensors):
        if entry < x.numel():
            change = torch.zeros_like(x).reshape(-1)
            change[entry] = 1.0
            unit[index] = change.view(x.shape)
            break
        entry -= x.numel()
    return unit


def _along(val_gradient: Tree, tangent: Tangent) -> float | None:
    """∂L_V/∂w · ẇ, the weights being every so many of the tensors of a point; None where no weight moves."""
    kept = len(tangent) // len(val_gradient)
    moved = {n: x for n, x in zip(val_gradient, tangent[::kept], strict=True) if x is not None}
    return _tree.dot(moved, val_gradient) if moved else None


def _by_name(
    entries: Sequence[float | None], hyperparameters: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Entries of all hyperparameters, in order, as tensors; None for those that move no weight."""
    found: dict[str, Tensor | None] = {}
    begin = 0
    for name, p in hyperparameters.items():
        own = entries[begin : begin + p.numel()]
        begin += p.numel()
        values = torch.tensor([x or 0.0 for x in own], dtype=torch.float64)
        idle = bool(own) and all(x is None for x in own)
        found[name] = None if idle else values.to(p.device, p.dtype).view(p.shape)
    return found
