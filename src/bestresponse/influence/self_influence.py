"""The effect of each training example on its own loss."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..curvatures import Curvature, Hessian
from ..errors import ArgumentError, EvaluationError, require_seed
from ..methods import Implicit
from ..passes.foreign_errors import foreign_errors_told
from ..problem import Passes, Problem
from ..solvers import Exact, Report
from ..verification.base import verified
from .solves import (
    Solves,
    as_one,
    check_batches,
    check_problem,
    check_size,
    require_some,
    size_of,
    sized,
    warn_of_failures,
    warn_of_missing,
)


@dataclass(frozen=True)
class SelfInfluence:
    """The derivatives of each training example's own loss with respect to its own weight.

    Attributes:
        scores: in the shape of the table of weights. Where the curvature is positive definite, scores are ≤ 0. Without
            the example, whose weight is 1, its own loss would be higher by about −score.
        examples: the number of examples that were scored.
        products: the number of products with the curvature in all solves.
        failed: the number of solves that failed.
        residual: the largest relative residual of a solve; None if a solve has none.
        verification: as `Hypergradient.verification`.
    """

    scores: Tensor
    examples: int
    products: int
    failed: int
    residual: float | None
    verification: str | None = None

    def largest(self, count: int = 10) -> Tensor:
        """The entries whose own loss depends most on their own weight, as indices of the flattened table, [count]."""
        flat = self.scores.flatten()
        return flat.topk(min(count, len(flat)), largest=False).indices


def self_influence(
    problem: Problem,
    train_batches: Iterable[Any],
    method: Implicit | None = None,
    *,
    solve_on: Any = None,
    size: float | None = None,
    seed: int | None = None,
) -> SelfInfluence:
    """The effect of each training example on its own loss, through the trained weights.

        s_i = dℓ_i/dc_i = −g_iᵀ A⁻¹ g_i / N,    g_i = ∂ℓ_i/∂w,    L_T = (1/N) Σ c_i ℓ_i + regulariser

    c is the problem's only table of hyperparameters, such as `hyperparameters.Weights` with ``positive="clamp"``. For
    other tables, s_i is the derivative of N ∂L_T/∂c_i through the weights. The unit is that of `influence`: loss per
    weight. Large values mark examples that the model fits only because it was trained on them: wrong labels, and rare
    cases. g_iᵀ A⁻¹ g_i itself is −N s_i.

    Each example costs a solve, and a backward pass of its batch: use small batches here, and large ones in
    ``solve_on``. Memory does not grow with the number of examples, except for the table of scores.

    Args:
        problem: the two losses; val_loss is not used.
        train_batches: as for `influence`. Each example is in one batch, whose number of examples is known.
        method: the solver and the curvature; None is ``Implicit(Exact())``, which decomposes one dense matrix for all
            examples, up to 5,000 weights. For more weights use
            ``Implicit(solvers.Inverse(KFAC(..., steady=0)))``, which needs no product.
        solve_on: as for `influence`.
        size: as for `influence`.
        seed: as for `hypergradient`.

    Raises:
        ArgumentError: the problem has several hyperparameters, or several processes.
        EvaluationError: an example is in two batches; a batch has no known number of examples; or as for
            `hypergradient`.

    Reference: Koh and Liang (2017); Feldman and Zhang (2020).
    """
    method = Implicit(Exact(), Hessian()) if method is None else method
    name, table = _checked(problem, train_batches, method)
    method = replace(method, curvature=method.curvature.at_minimum())
    require_seed("seed", seed)
    check_size(size, train_batches)
    problem.check_intact()
    base = as_one(train_batches) if solve_on is None else solve_on
    curvature = Hessian() if method.curvature.twice else method.curvature
    with foreign_errors_told(), problem.edits.whole(problem.live()):
        with problem.undisturbed(seed, None, method.twice) as passes:
            solves, found = Solves(passes, base, method), _Found(table)
            for number, (batch, share) in enumerate(sized(train_batches)):
                count = size_of(batch)
                with passes.numbered(number):
                    for entry, slope in _slopes(passes, curvature, batch, name):
                        found.add(entry, slope, count * share, solves)
                found.whole += share
                found.examples += count
            require_some(found.whole)
            passes.conclude()
        outcome = verified(_of_own_loss(problem), method.claim(), base, base, seed)
    return found.result(name, found.whole if size is None else size, outcome)


class _Found:
    """The scores as they come, and what is kept of the reports."""

    def __init__(self, table: Tensor) -> None:
        self.whole, self.examples = 0.0, 0
        self._scores = torch.zeros_like(table).detach().flatten()
        self._seen = torch.zeros(table.numel(), dtype=torch.bool)
        self._shape = table.shape
        self._products, self._solves = 0, 0
        self._residual: float | None = 0.0
        self._failed: list[Report] = []

    def add(self, entry: int, slope: Tree, factor: float, solves: Solves) -> None:
        """Solve for one entry, and subtract ``factor`` · slopeᵀ A⁻¹ slope."""
        if bool(self._seen[entry]):
            raise EvaluationError(
                f"self_influence takes examples with a weight for each, each in one batch; got entry {entry} in two "
                "batches. For weights of groups pass their members as queries of influence."
            )
        self._seen[entry] = True
        # A weight that the system lacks does not respond.
        solution = solves.solve(solves.system.covered(slope))
        self._scores[entry] -= factor * _tree.dot({n: slope[n] for n in solution.x}, solution.x)
        self._solves += 1
        report = solution.report
        self._products += report.products
        if report.residual is None or self._residual is None:
            self._residual = None
        else:
            self._residual = max(self._residual, report.residual)
        if report.status.failed:
            self._failed.append(report)

    def result(self, name: str, whole: float, verification: str | None) -> SelfInfluence:
        """The scores, with warnings of failed solves and of entries in no batch."""
        warn_of_failures(self._failed, self._solves)
        warn_of_missing(name, self._seen)
        scores = (self._scores / whole).reshape(self._shape)
        return SelfInfluence(
            scores, self.examples, self._products, len(self._failed), self._residual, verification
        )


def _slopes(passes: Passes, curvature: Curvature, batch: Any, name: str) -> Iterator[tuple[int, Tree]]:
    """For each entry of the table in a batch: its index, and ∂²L/∂w∂c_i of the batch's mean loss L."""
    problem = passes.problem
    table, weights = problem.hyperparameters[name], problem.weights
    entries = _entries(passes, curvature, batch, name)
    loss = passes.train_loss(batch)
    (of_table,) = torch.autograd.grad(loss, [table], create_graph=True, allow_unused=True)
    if of_table is None or not of_table.requires_grad:
        raise EvaluationError(
            f"train_loss must weigh the losses of examples by {name!r}; it does not depend on it in a way that moves "
            "the weights. Use it in the loss, through the argument hyper: (hyper(index) * losses).mean()."
        )
    for entry in entries:
        passes.rewind()
        found = torch.autograd.grad(
            of_table.flatten()[entry],
            list(weights.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        yield entry, {n: _tree.dense(g) for n, g in zip(weights, found, strict=True)}


def _entries(passes: Passes, curvature: Curvature, batch: Any, name: str) -> list[int]:
    """The entries of the table in a batch: those of a sparse product, or those that move the weights."""
    system = curvature.linearise(passes, batch)
    generator = torch.Generator().manual_seed(0)
    # A random vector is orthogonal to no slope.
    weights = system.covered(passes.problem.weights)
    v = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for n, w in weights.items()}
    product = system.mixed(v)[name]
    if product is None:
        return []
    rows = product.coalesce().indices()[0] if product.is_sparse else product.flatten().nonzero()[:, 0]
    return [int(row) for row in rows]


def _of_own_loss(problem: Problem) -> Problem:
    """The same problem with the training loss for both losses."""
    other = copy.copy(problem)
    other.val_loss = problem.train_loss
    return other


def _checked(problem: Any, train_batches: Any, method: Any) -> tuple[str, Tensor]:
    """The problem's table with its name."""
    check_problem("self_influence", problem, method)
    check_batches("self_influence.train_batches", train_batches)
    if len(problem.hyperparameters) != 1:
        raise ArgumentError(
            "self_influence needs a problem with one table of weights of examples as its hyperparameters; got "
            f'{sorted(problem.hyperparameters)[:5]}. Make a Problem with hyperparameters.Weights(n, "clamp").'
        )
    if problem.group.averages:
        raise ArgumentError(
            f"self_influence runs in one process; got a group of {problem.group.size}. Make the Problem with "
            "group=None, and score a part of the batches on each rank with size=N."
        )
    ((name, table),) = problem.hyperparameters.items()
    return name, table
