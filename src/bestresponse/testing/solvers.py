"""Checks of a solver, against the dense answer."""

from collections.abc import Sequence
from typing import Any

import torch

from .. import _tree
from .._tree import Tree
from ..solvers import Solution, Solver, Status
from .comparison import relative_error
from .systems import LinearSystem, linear_systems


def check_solver(
    solver: Solver, tolerance: float = 1e-6, seed: int = 0, scales: Sequence[float] = (300.0, 1e-3)
) -> None:
    """Check a solver on `linear_systems`.

    On definite systems the answer must be the dense one to ``tolerance`` (in float32 to its precision). On all
    systems: products are counted; the reported residual is the true one, to rounding; the status is *converged* only
    for a computed residual; an answer is finite or the status says why not; right-hand sides of any size give
    answers of that size; and a warm start from the solution stays there.

    Args:
        solver: a solver that should converge on nine unknowns with a condition number of four.
        tolerance: the largest relative error.
        seed: the seed of the systems.
        scales: factors of the definite system, whose eigenvalues lie between 0.5 and 2, that the solver must also
            handle. Pass ``()`` for a solver with a fixed step, which suits only one scale.
    """
    for system in linear_systems(seed, scales):
        solution = _counted_solve(solver, system)
        report = solution.report
        damping = report.damping or 0.0
        _require(not _tree.not_finite(solution.x), system, "a finite answer", solution.x)
        true = system.residual(solution.x, damping)
        if report.residual is not None:
            _require(true <= 2.0 * report.residual + 100 * system.eps, system, f"residual {true}", report)
        if report.status.failed:
            _require(true <= 1.0 + 100 * system.eps, system, "a best iterate no worse than zero", true)
        if report.status is Status.CONVERGED:
            _require(report.residual is not None, system, "`converged` with a residual", report)
            _require(true <= 1e-5, system, "a residual that deserves `converged`", true)
        if system.definite:
            matrix = system.matrix.double() + damping * torch.eye(len(system.b), dtype=torch.float64)
            expected = torch.linalg.solve(matrix, system.b.double())
            error = relative_error(_tree.flatten(solution.x).double(), expected)
            bound = max(tolerance, 100 * system.eps)
            _require(error <= bound, system, f"an error below {bound}", error)
            _check_scaling(solver, system)
            _check_warm_start(solver, system, solution)
    zero = solver.solve(system.product, _tree.zeros_like(system.tree))
    _require(_tree.norm(zero.x) == 0.0, system, "zero for a right-hand side of zero", zero.x)


def _counted_solve(solver: Solver, system: LinearSystem, **arguments: Any) -> Solution:
    calls = 0

    def product(v: Tree) -> Tree:
        nonlocal calls
        calls += 1
        return system.product(v)

    b = system.tree
    solution = solver.solve(product, b, **arguments)
    _require(solution.report.products == calls, system, f"{calls} products", solution.report)
    _require(torch.equal(_tree.flatten(b), system.b), system, "an untouched right-hand side", b)
    return solution


def _check_scaling(solver: Solver, system: LinearSystem) -> None:
    plain = _tree.flatten(solver.solve(system.product, system.tree).x)
    for factor in (1e-200, 1e200) if system.b.dtype == torch.float64 else (2.0**-100, 2.0**100):
        scaled = solver.solve(system.product, system.unflatten(factor * system.b))
        error = relative_error(_tree.flatten(scaled.x) / factor, plain)
        bound = 1e-12 if system.b.dtype == torch.float64 else 1e-4
        _require(error <= bound, system, f"{factor} times the answer for {factor} times b", error)


def _check_warm_start(solver: Solver, system: LinearSystem, solution: Solution) -> None:
    x = solution.x
    again = _counted_solve(solver, system, start=x, memory=solution.memory)
    before = system.residual(x, again.report.damping or 0.0)
    after = system.residual(again.x, again.report.damping or 0.0)
    _require(
        after <= before + 1e3 * system.eps, system, "a warm start from the solution to stay there", after
    )
    bad = system.unflatten(-1e9 * system.b)
    dropped = _counted_solve(solver, system, start=bad, memory=solution.memory)
    _require(not dropped.report.warm, system, "a bad start dropped", dropped.report)


def _require(condition: bool, system: LinearSystem, required: str, got: object) -> None:
    assert condition, f"on the system {system.name!r}, required {required}; got {got}"
