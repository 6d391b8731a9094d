"""Differentiation through optimisation in reverse mode: the hypergradient of a few steps of an update rule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from .._tree import Tree
from ..errors import ArgumentError, require, require_integer
from ..passes import graph
from ..passes.running_statistics import Reading
from ..problem import Passes, Problem
from ..solvers.capacity import require_memory
from ..verification.base import Claim
from .base import combine
from .hypergradient import Hypergradient
from .reach import refuse_unreached
from .rules import SGD, Rule
from .savings import bytes_of, savings
from .steps_ahead import ThroughSteps, at_the_end, claim_of
from .trajectory import Piece, Point, Trajectory


@dataclass(frozen=True, eq=False)
class Unrolled(ThroughSteps):
    """Look K steps of an optimiser ahead, and differentiate the validation loss through them.

        w_{k+1} = w_k − α ∂L_T/∂w(w_k, λ),  w_0 the present weights;  the result is dL_V(w_K, λ)/dλ

    The steps are made on copies: nothing is written back. ``val_loss`` and ``direct`` of the result
    are at w_K, with the buffers that the steps left. Running statistics that the validation loss reads depend on
    w_K and λ, as those of the training batch do; other buffers are constants. Every step uses the same random
    state. At a stationary point of the training loss the result equals that of
    ``Implicit(Neumann(terms=K - 1, scale=α))``.

    To tune settings of the optimiser, pass functions of the module ``hyper``, as in
    ``Unrolled(20, lambda hyper: hyper.log_rate.exp(), rule=rules.SGD(momentum=lambda hyper: hyper.logit.sigmoid()))``.
    Such a function returns a scalar tensor, one of shape [steps] with a value for each step, a dict by weight
    with tensors that broadcast against the weights, or a sequence of ``steps`` scalars or dicts.

    Args:
        steps: K ≥ 1.
        step_size: α > 0, or a function of ``hyper``.
        last: differentiate the last ``last`` steps only (truncated unrolling); None means all.
        rule: the optimiser's steps. Its moments begin as a copy of those of the weight optimiser (the tuner's,
            or ``hypergradient(..., weight_optimizer=...)``) if it matches the rule's class, and otherwise as zeros.
        checkpoint_every: keep weights and moments every so many steps, and repeat the steps between them
            to differentiate them. Memory holds K / checkpoint_every copies and checkpoint_every graphs instead of
            K graphs, at one more training gradient a step. About √K needs the least memory.
        trajectory: "exact"; or "interpolated", which keeps only the first and last point, and differentiates
            the steps at points on the straight line between them (DrMAD). It is exact if the weights (and
            moments) move on a straight line with constant speed.
        fresh_batches: whether each step takes the next of several `Batches` (and its own dropout masks), or
            all of them together.

    Raises:
        ArgumentError: an argument is out of its range.
        EvaluationError: a loss uses an original weight besides the argument ``model``, or a function of ``hyper``
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

    @property
    def savings(self) -> str:
        size = self.checkpoint_every or self.steps
        fewer = (
            f"checkpoint_every near {math.isqrt(self.steps)}"
            if size != math.isqrt(self.steps)
            else "fewer steps"
        )
        kept = fewer if self.trajectory == "exact" else "fewer steps"
        return f"{kept}; last=...; Implicit()"

    def _require_memory(self, problem: Problem, train_batch: Any) -> None:
        """Raise if the points that are kept do not fit; the graphs between them come on top."""
        length = self.last or self.steps
        size = min(self.checkpoint_every or length, length)
        points = size + length // size if self.trajectory == "exact" else 3
        copies = points * (1 + len(self.rule.moments))
        what = f"Unrolled with {length:,} steps"
        require_memory(what, bytes_of(problem.weights, copies), savings(self.savings, train_batch))

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        path = Trajectory(self.rule, self.step_size, self.steps, passes, train_batch, self.fresh_batches)
        self._require_memory(problem, train_batch)
        first = 0 if self.last is None else self.steps - self.last
        start = path.run(path.start(), 0, first)
        end, pieces = (self._exact if self.trajectory == "exact" else self._interpolated)(path, start, first)
        read = Reading(passes, train_batch)
        val_loss, val_gradient, direct = at_the_end(passes, val_batch, end, read)
        del start, end
        indirect = _through(path, pieces, val_gradient, first)
        path.finish()
        refuse_unreached(problem, direct, path.reached)
        result = combine(problem, val_loss, direct, dict(zip(problem.hyperparameters, indirect, strict=True)))
        return replace(result, norms=read.norms)

    def claim(self) -> Claim:
        # A part of the differentiated steps: the last steps, or steps for which the straight line is exact.
        short = replace(self, last=None, checkpoint_every=None, trajectory="exact", fresh_batches=False)
        return claim_of(self, self.rule, short)

    def _exact(self, path: Trajectory, start: Point, first: int) -> tuple[Point, Iterator[Piece]]:
        """The last point, and the graphs of the steps between the stored points, from the last to the first."""
        size = self.checkpoint_every or self.steps
        begins = range(first, self.steps, size)
        points = [start]
        for begin in begins[:-1]:
            points.append(path.run(points[-1], begin, begin + size))
        last = path.graphs(points.pop(), begins[-1], self.steps)

        def pieces() -> Iterator[Piece]:
            while last:
                yield last.pop()
            for begin in reversed(begins[:-1]):
                block = path.graphs(points.pop(), begin, begin + size)
                while block:
                    yield block.pop()

        return last[-1].end, pieces()

    def _interpolated(self, path: Trajectory, start: Point, first: int) -> tuple[Point, Iterator[Piece]]:
        """The same, with each step at a point between the first and the last."""
        end = path.run(start, first, self.steps)
        length = self.steps - first
        points = ((k, start.towards(end, (k - first) / length)) for k in reversed(range(first, self.steps)))
        return end, (path.graph(point, k, k + 1) for k, point in points)


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
        total = [graph.plus(sofar, x) for sofar, x in zip(total, pulled[of_point:], strict=True)]
    of_settings, of_hyperparameters = total[: -len(hyperparameters)], total[-len(hyperparameters) :]
    through_settings = path.settings.pull(of_settings, hyperparameters)
    return [graph.plus(a, b) for a, b in zip(of_hyperparameters, through_settings, strict=True)]
