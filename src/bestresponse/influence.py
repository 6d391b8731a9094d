"""The effect of training examples on validation losses: influence functions."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import errors
from .batches import Batches, length_of, weighted
from .curvatures import Hessian
from .curvatures.several_batches import linear_system
from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, EvaluationError
from .influence_sums import Query, Sums
from .methods import Implicit
from .methods.hypergradient import failure_message
from .methods.supplies import supplies
from .methods.validation import validation_gradient
from .passes.foreign_errors import foreign_errors_told
from .passes.forms import paused
from .passes.running_statistics import Reading
from .problem import Passes, Problem
from .solvers import ConjugateGradient, Report
from .verification.base import verified


@dataclass(frozen=True)
class Influence:
    """The derivatives of the losses of Q queries with respect to the hyperparameters, such as weights of examples.

    Attributes:
        scores: by hyperparameter, [Q, *shape]. The score of an example's weight is negative if more weight lowers the
            query's loss: the example helps. Without the example, whose weight is 1, the loss would be higher by
            about −score.
        losses: the loss of each query, [Q].
        solves: the report of each solve.
        examples: the number of examples that were scored.
        verification: as `Hypergradient.verification`.
    """

    scores: dict[str, Tensor]
    losses: Tensor
    solves: tuple[Report, ...]
    examples: int
    verification: str | None = None

    def helpful(self, count: int = 10) -> Tensor:
        """The entries that lower each query's loss most, as indices of the flattened table, [Q, count]."""
        return self._extreme(count, largest=False)

    def harmful(self, count: int = 10) -> Tensor:
        """The entries that raise each query's loss most, as indices of the flattened table, [Q, count]."""
        return self._extreme(count, largest=True)

    def _extreme(self, count: int, largest: bool) -> Tensor:
        if len(self.scores) != 1:
            raise ArgumentError(
                f"a ranking needs one table of hyperparameters; got {sorted(self.scores)[:5]}. Sort "
                "influence.scores[name] yourself."
            )
        (scores,) = self.scores.values()
        flat = scores.flatten(1)
        return flat.topk(min(count, flat.shape[1]), largest=largest).indices


def influence(
    problem: Problem,
    train_batches: Iterable[Any],
    queries: Iterable[Any],
    method: Implicit | None = None,
    *,
    solve_on: Any = None,
    size: float | None = None,
    seed: int | None = None,
) -> Influence:
    """The effect of each training example (class, source, token) on the validation loss of each query.

        s_q = ∂L_q/∂λ − (A⁻¹ ∂L_q/∂w) · ∂²L_T/∂w∂λ

    λ are the hyperparameters of the problem, such as the weights of examples of `hyperparameters.Weights` with
    ``positive="clamp"``, and L_T is the mean over all training examples. The curvature A is that of one large set of
    examples, and all queries share it. The mixed term is a sum over batches, which are read one by one: memory does not
    grow with their number. Each query costs a solve and, for each batch, about the backward pass of a gradient.

    Train the weights to a minimum of the training loss first. In a network, A may be indefinite: use `GaussNewton`,
    or damping.

    Args:
        problem: the two losses. ``val_loss`` is the loss of a query.
        train_batches: the batches to score: a list, a loader, or `Batches`. Each counts by its number of examples,
            or by the weights of `Batches`.
        queries: a list with a validation batch for each query; for the influence on the mean loss of a whole
            set, a list with one batch (or `Batches`).
        method: the solver and the curvature; None is ``Implicit(ConjugateGradient(100, tolerance=1e-3))``. Every solve
            starts from zero, and may use the pairs that earlier ones recycle.
        solve_on: the batch, or `Batches`, for the curvature: None means all training batches, whose graphs are built
            again for each product. For large data, a random part of it is faster.
        size: N, the number of training examples of which ``train_batches`` are a part; None means that they are all.
        seed: as for `hypergradient`.

    Raises:
        ArgumentTypeError: ``queries`` is a single batch, or ``method`` is not an `Implicit`.
        EvaluationError: a batch has no known number of examples; or as for `hypergradient`.

    Reference: Koh and Liang (2017).
    """
    method = Implicit(ConjugateGradient(100, tolerance=1e-3), Hessian()) if method is None else method
    questions = _checked(problem, train_batches, queries, method)
    errors.require_seed("seed", seed)
    errors.require_positive("size", size)
    problem.check_intact()
    base = _all(train_batches) if solve_on is None else solve_on
    with foreign_errors_told(), problem.edits.whole(problem.live()):
        with problem.undisturbed(seed, None, method.twice) as passes:
            found = _Solves(passes, base, method).of(questions)
            sums = Sums(problem, len(found))
            problem.group.together(lambda: _stream(passes, train_batches, method, found, sums))
            sums.join(problem.group)
            scores = sums.scores(found, size)
            passes.conclude()
        outcome = verified(problem, method.claim(), base, questions[0], seed)
    _warn_of_failures([each.solution.report for each in found])
    return Influence(
        scores,
        torch.tensor([each.loss for each in found], dtype=torch.float64),
        tuple(each.solution.report for each in found),
        int(sums.examples),
        outcome,
    )


class _Solves:
    """The solves of all queries, which share the linearisation and the preconditioner."""

    def __init__(self, passes: Passes, batch: Any, method: Implicit) -> None:
        self._passes, self._batch, self._method = passes, batch, method
        self._system = linear_system(method.curvature, passes, batch)

    def of(self, queries: list[Any]) -> list[Query]:
        """A query for each validation batch."""
        solver = self._method.solver
        assert solver is not None
        solver = solver.opening() if self._method.warm_start else solver
        wants, system = solver.wants, self._system
        supplied = supplies(wants, self._passes, self._batch, system.names)
        memory: dict[str, Any] = {}
        found = []
        for query in queries:
            loss, gradient, direct = validation_gradient(
                self._passes, query, Reading(self._passes, self._batch)
            )
            b = system.responding({n: gradient[n] for n in system.names})
            with paused() as resumed:
                products = system.in_turn(0) if wants.fresh_batches else system
                solution = solver.solve(resumed(products), b, memory=memory, **supplied)
            memory = dict(solution.memory)
            found.append(Query(loss, direct, replace(solution, residual=None, memory={})))
        return found


def _stream(
    passes: Passes, batches: Iterable[Any], method: Implicit, queries: list[Query], sums: "Sums"
) -> None:
    """Add the mixed products of one batch after the other."""
    problem = passes.problem
    curvature = Hessian() if method.curvature.twice else method.curvature
    for number, (batch, share) in enumerate(_sized(batches)):
        with passes.numbered(number):
            system = curvature.linearise(passes, batch)
            for q, query in enumerate(queries):
                x = query.solution.x
                # A weight that only this batch reaches has no solution: it does not respond.
                v = {n: x[n] if n in x else torch.zeros_like(problem.weights[n]) for n in system.names}
                sums.subtract(q, system.mixed(v, last=q == len(queries) - 1), share)
        sums.reached |= system.reached
        sums.whole += share
        sums.examples += length_of(batch) or 0
    if not sums.whole:
        raise ArgumentError("train_batches must hold at least one batch; got none.")


def _sized(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Each batch with its number of examples, or with its weight."""
    yield from weighted(batches) if isinstance(batches, Batches) else ((b, float(_size(b))) for b in batches)


def _size(batch: Any) -> int:
    size = length_of(batch)
    if size is None:
        raise EvaluationError(
            "influence counts each training batch by its number of examples, so a batch must be a tensor, or a tuple, "
            f"list or dict of tensors of one length; got {type(batch).__name__}. Pass Batches(batches, weights=sizes)."
        )
    return size


def _all(batches: Iterable[Any]) -> Batches:
    """All training batches as one, with their sizes as weights."""
    if isinstance(batches, Batches):
        return batches
    every = list(batches)
    return Batches(every, [_size(batch) for batch in every] or None, recompute=len(every) > 1)


def _checked(problem: Any, train_batches: Any, queries: Any, method: Any) -> list[Any]:
    """The queries as a list."""
    if not isinstance(problem, Problem) or len(problem.singles) != 1:
        raise ArgumentTypeError(
            f"influence takes a Problem over one copy of the weights; got {type(problem).__name__}."
        )
    if not isinstance(method, Implicit):
        raise ArgumentTypeError(
            f"influence takes a method Implicit(solver, curvature), which solves a linear system; got {method!r}."
        )
    for name, given in (("train_batches", train_batches), ("queries", queries)):
        if not isinstance(given, Iterable) or isinstance(given, Tensor | tuple | dict | str):
            raise ArgumentTypeError(
                f"influence.{name} must be a list of batches, or a loader; got {type(given).__name__}. Put a single "
                "batch into a list."
            )
        if iter(given) is given:
            raise ArgumentTypeError(
                f"influence.{name} must be iterable more than once; got an iterator. Pass a list."
            )
    questions = [queries] if isinstance(queries, Batches) else list(queries)
    if not questions:
        raise ArgumentError("influence.queries must hold at least one validation batch; got none.")
    return questions


def _warn_of_failures(reports: list[Report]) -> None:
    """Warn of failed solves."""
    if failed := [report for report in reports if report.status.failed]:
        warnings.warn(
            f"{len(failed)} of {len(reports)} solves of influence failed; the first: "
            f"{failure_message(failed[0], {})}",
            BestResponseWarning,
            stacklevel=3,
        )
