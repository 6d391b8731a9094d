"""What a solve leaves out of the hypergradient, and how far its damping moved it."""

from collections.abc import Callable
from typing import Any

from .. import _tree
from .._tree import Tree
from ..solvers import Solution
from .hypergradient import Hypergradient


def missing_part(mixed_product: Callable[..., Any], solution: Solution, b: Tree) -> float | None:
    """An estimate of ‖A⁻¹r · ∂²L_T/∂w∂λ‖, the part of the hypergradient that the residual r = b − A x leaves out.

    The estimate replaces A⁻¹ by the factor ‖x‖ / ‖b‖ by which it stretched the right-hand side.
    """
    if solution.residual is None:
        return None
    mixed = mixed_product(solution.residual, False)
    of_residual = _tree.norm({n: x for n, x in mixed.items() if x is not None})
    return of_residual * _tree.norm(solution.x) / _tree.norm(b)


def damping_stretch(solution: Solution, b: Tree) -> float | None:
    """By what factor the solution would be longer without its damping, minus one; None without damping or an answer.

    x₀ − x = δ A⁻¹ x. A conjugate gradient solve from zero has this on its Krylov space. Otherwise the inverse of
    the curvature along x, xᵀA x / xᵀx, replaces A⁻¹. It costs no product, since A x = b − r − δ x, and is a lower
    bound.
    """
    report, x = solution.report, solution.x
    if not report.damping or report.indefinite:
        return None
    if solution.stretch is not None:
        return solution.stretch
    square = _tree.dot(x, x)
    along = _tree.dot(x, b) - report.damping * square
    along -= _tree.dot(x, solution.residual) if solution.residual is not None else 0.0
    return report.damping * square / along if along > 0.0 else None


def damping_effect(result: Hypergradient, stretch: float | None) -> float | None:
    """An estimate of ‖h − h₀‖ / ‖h₀‖, where h₀ = direct + (1 + stretch) · indirect is h without damping."""
    if stretch is None:
        return None
    undamped = _tree.norm(_tree.add(result.direct, result.indirect, 1.0 + stretch))
    return stretch * _tree.norm(result.indirect) / undamped if undamped > 0.0 else None
