"""What both kinds of influence share: batches with their sizes, and solves with one linearisation."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .._tree import Tree
from ..batches import Batches, length_of, weighted
from ..curvatures.several_batches import linear_system
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    BestResponseWarning,
    EvaluationError,
    require_positive,
)
from ..methods import Implicit
from ..methods.hypergradient import failure_message
from ..methods.supplies import supplies
from ..passes.forms import paused
from ..problem import Passes, Problem
from ..solvers import Exact, Nystrom, Report, Solution

_ALL = 2**62


class Solves:
    """Solves of one linear system for many right-hand sides, which share the linearisation and what solvers keep."""

    def __init__(self, passes: Passes, batch: Any, method: Implicit) -> None:
        solver = method.solver
        assert solver is not None
        solver = solver.opening() if method.warm_start else solver
        # The matrix is the same in all solves.
        self._solver = replace(solver, reuse=_ALL) if isinstance(solver, Exact | Nystrom) else solver
        self.system = linear_system(method.curvature, passes, batch)
        self._supplied = supplies(self._solver.wants, passes, batch, self.system.names)
        self._memory: dict[str, Any] = {}

    def solve(self, gradient: Tree) -> Solution:
        """A⁻¹ b for a gradient b with an entry for each weight of the system."""
        system = self.system
        b = system.responding(system.covered(gradient))
        with paused() as resumed:
            products = system.in_turn(0) if self._solver.wants.fresh_batches else system
            solution = self._solver.solve(resumed(products), b, memory=self._memory, **self._supplied)
        self._memory = dict(solution.memory)
        detail = "; ".join(filter(None, (solution.report.detail, system.detail)))
        return replace(solution, report=replace(solution.report, detail=detail), residual=None, memory={})


def sized(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Each batch with its number of examples; one of `Batches` with its weight, as it was passed in."""
    if isinstance(batches, Batches):
        yield from ((batch, weight * (batches.total or 1.0)) for batch, weight in weighted(batches))
    else:
        yield from ((batch, float(size_of(batch))) for batch in batches)


def size_of(batch: Any) -> int:
    """The number of examples of a batch; raises if it cannot be known."""
    size = length_of(batch)
    if size is None:
        raise EvaluationError(
            "influence counts each training batch by its number of examples, so a batch must be a tensor, or a tuple, "
            f"list or dict of tensors of one length; got {type(batch).__name__}. Pass Batches(batches, weights=sizes)."
        )
    return size


def as_one(batches: Iterable[Any]) -> Batches:
    """All training batches as one, with their sizes as weights."""
    if isinstance(batches, Batches):
        return batches
    every = list(batches)
    return Batches(every, [size_of(batch) for batch in every] or None, recompute=len(every) > 1)


def check_problem(name: str, problem: object, method: object) -> None:
    """Raise unless the function ``name`` can use the problem and the method."""
    if not isinstance(problem, Problem) or len(problem.singles) != 1:
        raise ArgumentTypeError(
            f"{name} takes a Problem over one copy of the weights; got {type(problem).__name__}."
        )
    if not isinstance(method, Implicit):
        raise ArgumentTypeError(
            f"{name} takes a method Implicit(solver, curvature), which solves a linear system; got {method!r}."
        )


def check_size(size: object, batches: object) -> None:
    """Raise unless ``size`` is a number of examples that the weights of the batches go with."""
    require_positive("size", size)
    if size is not None and isinstance(batches, Batches) and batches.total is None:
        raise ArgumentError(
            "size needs Batches that have the numbers of their examples as weights; got Batches without weights. "
            "Pass Batches(batches, weights=sizes)."
        )


def check_batches(name: str, given: object) -> None:
    """Raise unless the argument ``name`` is a collection of batches that can be read twice."""
    if not isinstance(given, Iterable) or isinstance(given, Tensor | tuple | dict | str):
        raise ArgumentTypeError(
            f"{name} must be a list of batches, or a loader; got {type(given).__name__}. Put a single "
            "batch into a list."
        )
    if iter(given) is given:
        raise ArgumentTypeError(f"{name} must be iterable more than once; got an iterator. Pass a list.")


def require_some(whole: float) -> None:
    """Raise if there was no training batch."""
    if not whole:
        raise ArgumentError("train_batches must hold at least one batch; got none.")


def warn_of_failures(reports: Sequence[Report], number: int) -> None:
    """Warn of failed solves among a number of them."""
    if reports:
        warnings.warn(
            f"{len(reports)} of {number} solves of influence failed; the first: {failure_message(reports[0], {})}",
            BestResponseWarning,
            stacklevel=4,
        )


def warn_of_missing(name: str, seen: Tensor) -> None:
    """Warn if entries of a table are in no training batch; ``seen`` marks the others."""
    if not bool(seen.all()):
        warnings.warn(
            f"{int((~seen).sum())} of the {len(seen)} entries of {name!r} are in no training batch: their "
            "scores are 0. Pass a loader over all examples, with drop_last=False.",
            BestResponseWarning,
            stacklevel=4,
        )
