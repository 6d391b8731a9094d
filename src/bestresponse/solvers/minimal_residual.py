"""Minimal residuals over the Krylov space: for curvatures that are indefinite, singular or not quite symmetric."""

import math
from dataclasses import dataclass

import torch

from .. import _tree
from .._tree import Tree
from .base import (
    Report,
    Solution,
    Solver,
    Status,
    System,
    Tolerance,
    add_damping,
    at_present,
    require,
    require_integer,
    require_number,
    require_tolerance,
)

# What a solve may leave of the right-hand side and still count as one, as for the dense inverse.
_LEFT = 1e-2


@dataclass(frozen=True, eq=False)
class _MinimalResidual(Solver):
    """What the two methods share: arguments, damping, and how an end is told."""

    max_steps: int = 20
    tolerance: Tolerance = 1e-6
    damping: float = 0.0

    needs_definite = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_integer(f"{name}.max_steps", self.max_steps, 1)
        require_tolerance(f"{name}.tolerance", self.tolerance)
        require_number(f"{name}.damping", self.damping)
        require(0 <= self.damping < math.inf, f"{name}.damping", "≥ 0 and finite", self.damping)

    def shift(self, memory: object) -> float:
        return self.damping

    def _end(
        self, system: System, x: Tree, residual: float, steps: int, exhausted: bool, ritz: list[float]
    ) -> Solution:
        """The solution; ``exhausted``: no further step can bring the residual down."""
        goal = system.target * at_present(self.tolerance)
        status, detail = Status.CONVERGED if residual <= goal else Status.STEP_LIMIT, ""
        if exhausted and residual > goal:
            status = Status.CONVERGED if residual <= _LEFT * system.target else Status.DIVERGED
            detail = "the curvature is singular: the least-squares solution on the Krylov space"
        elif ritz and ritz[0] < 0.0:
            detail = "negative curvature: the weights are at no minimum of the training loss"
        report = Report(
            status,
            steps,
            steps,
            residual,
            damping=self.damping or None,
            curvature=(ritz[0], ritz[-1]) if ritz else None,
            detail=detail,
        )
        return Solution(x, report)

    def _not_finite(self, like: Tree, steps: int) -> Solution:
        return Solution(_tree.zeros_like(like), Report(Status.NOT_FINITE, steps, steps, 1.0))


@dataclass(frozen=True, eq=False)
class MINRES(_MinimalResidual):
    """Solve (A + δI) x = b by minimal residuals, for a symmetric A that may be indefinite.

        x_k = argmin ‖b − (A + δI) x‖  over  span{b, A b, …, A^{k−1} b}

    The residual never grows. Three vectors more than the solution, whatever the steps; one product each. Where A is
    singular the answer is a least-squares solution; one that leaves more than a hundredth of b is *diverged*, since
    there is none. At weights that are no minimum of the training loss, the answer is A⁻¹b all the same, and the report
    names the negative curvature.

    Args:
        max_steps: the largest number of steps; ≥ 1.
        tolerance: the residual, relative to b, to stop at; ≥ 0. Or a function of the number of solves before.
        damping: δ ≥ 0.

    Reference: Paige and Saunders (1975).
    """

    def iterate(self, system: System) -> Solution:
        # Names as in the paper: Lanczos' α and β, rotations (c, s), the last entries ε, δ̄, γ̄ of the reduced rows.
        v, before = _tree.copy(system.b), _tree.zeros_like(system.b)
        x, w, w_before = (_tree.zeros_like(system.b) for _ in range(3))
        beta, phi, delta_bar, epsilon, c, s = 0.0, 1.0, 0.0, 0.0, -1.0, 0.0
        squares, steps, exhausted = 0.0, 0, False
        alphas: list[float] = []
        betas: list[float] = []
        eps = max(torch.finfo(part.dtype).eps for part in v.values())
        while steps < self.max_steps and phi > system.target * at_present(self.tolerance):
            y = add_damping(system.A(v), v, self.damping)
            alpha = _tree.dot(v, y)
            if not math.isfinite(alpha):
                return self._not_finite(v, steps + 1)
            y = _tree.add(_tree.add(y, v, -alpha), before, -beta)
            alphas.append(alpha)
            steps += 1
            after = _tree.norm(y)
            squares += alpha**2 + beta**2 + after**2
            delta, gamma_bar = c * delta_bar + s * alpha, s * delta_bar - c * alpha
            old_epsilon, epsilon, delta_bar = epsilon, s * after, -c * after
            exhausted = math.hypot(gamma_bar, delta_bar) <= 10.0 * eps * math.sqrt(squares)
            if exhausted:
                break
            gamma = math.hypot(gamma_bar, after)
            c, s = gamma_bar / gamma, after / gamma
            new = _tree.add_(_tree.add(v, w_before, -old_epsilon), w, -delta)
            w_before, w = w, _tree.scale_(new, 1.0 / gamma)
            x = _tree.add_(x, w, c * phi)
            phi *= s
            if after <= 10.0 * eps * math.sqrt(squares):
                exhausted = True
                break
            betas.append(after)
            before, v, beta = v, _tree.scale_(y, 1.0 / after), after
        return self._end(system, x, phi, steps, exhausted, self._ritz(alphas, betas))

    def _ritz(self, alphas: list[float], betas: list[float]) -> list[float]:
        """The eigenvalues of A on the Krylov space."""
        matrix = torch.diag(torch.tensor(alphas, dtype=torch.float64))
        beside = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
        if len(beside):
            matrix = matrix + torch.diag(beside, 1) + torch.diag(beside, -1)
        values: list[float] = (torch.linalg.eigvalsh(matrix) - self.damping).tolist()
        return values


@dataclass(frozen=True, eq=False)
class GMRES(_MinimalResidual):
    """Solve (A + δI) x = b by minimal residuals with every basis vector kept, for an A that need not be symmetric.

    The same iterates as `MINRES` where A is symmetric and arithmetic exact. It keeps a vector for each step, and in
    return neither rounding nor an A that is not quite symmetric (differences of gradients, low precision) cost it its
    orthogonality. It gives A⁻¹b, where the other solvers' theory has A = Aᵀ.

    Args:
        max_steps: the largest number of steps, and of vectors kept; ≥ 1.
        tolerance: the residual, relative to b, to stop at; ≥ 0. Or a function of the number of solves before.
        damping: δ ≥ 0.

    Reference: Saad and Schultz (1986).
    """

    def iterate(self, system: System) -> Solution:
        basis = [_tree.copy(system.b)]
        columns: list[list[float]] = []
        residual, weights, exhausted = 1.0, torch.zeros(0, dtype=torch.float64), False
        eps = max(torch.finfo(part.dtype).eps for part in system.b.values())
        while len(columns) < self.max_steps and residual > system.target * at_present(self.tolerance):
            y = add_damping(system.A(basis[-1]), basis[-1], self.damping)
            size, column = _tree.norm(y), [0.0] * len(basis)
            if not math.isfinite(size):
                return self._not_finite(system.b, len(columns) + 1)
            y = _tree.copy(y)
            for _ in range(2):  # twice is enough, to rounding
                for index, q in enumerate(basis):
                    along = _tree.dot(q, y)
                    column[index] += along
                    y = _tree.add_(y, q, -along)
            after = _tree.norm(y)
            exhausted = after <= 10.0 * eps * size
            columns.append([*column, 0.0 if exhausted else after])
            residual, weights = _least_squares(columns)
            if exhausted:
                break
            basis.append(_tree.scale_(y, 1.0 / after))
        x = _tree.zeros_like(system.b)
        for weight, q in zip(weights.tolist(), basis, strict=False):
            x = _tree.add_(x, q, weight)
        square = _hessenberg(columns)[:-1]
        ritz = (torch.linalg.eigvalsh((square + square.T) / 2) - self.damping).tolist() if columns else []
        return self._end(system, x, residual, len(columns), exhausted, ritz)


def _hessenberg(columns: list[list[float]]) -> torch.Tensor:
    """H with A Q_k = Q_{k+1} H, [k + 1, k]."""
    k = len(columns)
    padded = [[*column, *[0.0] * (k + 1 - len(column))] for column in columns]
    return torch.tensor(padded, dtype=torch.float64).reshape(k, k + 1).T


def _least_squares(columns: list[list[float]]) -> tuple[float, torch.Tensor]:
    """The smallest ‖e₁ − H y‖, and its y of smallest norm."""
    matrix = _hessenberg(columns)
    first = torch.zeros(len(matrix), dtype=torch.float64)
    first[0] = 1.0
    y = torch.linalg.pinv(matrix, rtol=1e-13) @ first
    return float(torch.linalg.vector_norm(first - matrix @ y)), y
