"""The effect of training examples on validation losses: influence functions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..batches import Batches, length_of
from ..curvatures import Hessian
from ..errors import ArgumentError, require_seed
from ..methods import Implicit
from ..methods.validation import validation_gradient
from ..passes.foreign_errors import foreign_errors_told
from ..passes.running_statistics import Reading
from ..problem import Passes, Problem
from ..solvers import ConjugateGradient, Report
from ..verification.base import verified
from .solves import (
    Solves,
    as_one,
    check_batches,
    check_problem,
    check_size,
    require_some,
    sized,
    warn_of_failures,
)
from .sums import Query, Sums


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

    A sum of hypergradients, one for each batch, is not the influence: each of them has the curvature of its own batch.

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
    method = replace(method, curvature=method.curvature.at_minimum())
    require_seed("seed", seed)
    check_size(size, train_batches)
    problem.check_intact()
    base = as_one(train_batches) if solve_on is None else solve_on
    with foreign_errors_told(), problem.edits.whole(problem.live()):
        with problem.undisturbed(seed, None, method.twice) as passes:
            found = _solved(passes, base, method, questions)
            sums = Sums(problem, len(found))
            problem.group.together(lambda: _stream(passes, train_batches, method, found, sums))
            sums.join(problem.group)
            scores = sums.scores(found, size)
            passes.conclude()
        outcome = verified(problem, method.claim(), base, questions[0], seed)
    reports = [each.solution.report for each in found]
    warn_of_failures([report for report in reports if report.status.failed], len(reports))
    return Influence(
        scores,
        torch.tensor([each.loss for each in found], dtype=torch.float64),
        tuple(reports),
        int(sums.examples),
        outcome,
    )


def _solved(passes: Passes, batch: Any, method: Implicit, queries: list[Any]) -> list[Query]:
    """A query with its solution for each validation batch."""
    solves, found = Solves(passes, batch, method), []
    for query in queries:
        loss, gradient, direct = validation_gradient(passes, query, Reading(passes, batch))
        found.append(Query(loss, direct, solves.solve(gradient)))
    return found


def _stream(
    passes: Passes, batches: Iterable[Any], method: Implicit, queries: list[Query], sums: "Sums"
) -> None:
    """Add the mixed products of one batch after the other."""
    problem = passes.problem
    curvature = Hessian() if method.curvature.twice else method.curvature
    for number, (batch, share) in enumerate(sized(batches)):
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
    require_some(sums.whole)


def _checked(problem: Any, train_batches: Any, queries: Any, method: Any) -> list[Any]:
    """The queries as a list."""
    check_problem("influence", problem, method)
    check_batches("influence.train_batches", train_batches)
    check_batches("influence.queries", queries)
    questions = [queries] if isinstance(queries, Batches) else list(queries)
    if not questions:
        raise ArgumentError("influence.queries must hold at least one validation batch; got none.")
    return questions
