"""Minimal residuals that keep every basis vector: for curvatures that are not symmetric."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import _tree
from .._tree import Tree
from .minimal_residual import Cycle, MinimalResidual
from .system import Product, System, add_damping


@dataclass(frozen=True, eq=False)
class GMRES(MinimalResidual):
    """Solve (A + δI) x = b by minimal residuals that keep every basis vector, for an A that need not be symmetric.

    The iterates are those of `MINRES` if A is symmetric and arithmetic exact. It keeps a vector for each step. In
    return it stays orthogonal in spite of rounding or an A that is not quite symmetric (differences of gradients, low
    precision). It gives A⁻¹b, whereas the theory of the other solvers assumes A = Aᵀ.

    Args:
        max_steps: the largest number of steps, and of vectors kept; ≥ 1.
        tolerance: the residual, relative to b, to stop at; ≥ 0. Or a function of the number of solves before.
        damping: δ ≥ 0.
        preconditioner: M⁻¹ as a function r ↦ M⁻¹ r of dicts of tensors, or a curvature with an inverse, such as
            `KFAC`. It is applied from the right, so that the residual is minimal in its usual norm.

    Reference: Saad and Schultz (1986).
    """

    def cycle(
        self, system: System, b: Tree, goal: float, limit: int, precondition: Product | None
    ) -> Iterator[Cycle]:
        basis = [_tree.copy(b)]
        columns: list[list[float]] = []
        rotations, residual, invariant = _Rotations(), 1.0, False
        while len(columns) < limit and residual > goal and not invariant:
            z = basis[-1] if precondition is None else precondition(basis[-1])
            y = add_damping(system.A(z), z, self.damping)
            size, column = _tree.norm(y), [0.0] * len(basis)
            if not math.isfinite(size):
                yield Cycle(basis[0], math.nan, 0.0, len(columns) + 1, False, [])
                return
            y = _tree.copy(y)
            for _ in range(2):  # twice is enough, to rounding
                for index, q in enumerate(basis):
                    along = _tree.dot(q, y)
                    column[index] += along
                    y = _tree.add_(y, q, -along)
            after = _tree.norm(y)
            invariant = after <= 10.0 * system.eps * size
            columns.append([*column, 0.0 if invariant else after])
            residual = rotations.add(columns[-1])
            if not invariant:
                basis.append(_tree.scale_(y, 1.0 / after))
        matrix = _hessenberg(columns)
        within = residual <= goal
        residual, weights = _least_squares(matrix, system.eps)
        x = _tree.zeros_like(b)
        for weight, q in zip(weights.tolist(), basis, strict=False):
            x = _tree.add_(x, q, weight)
        square = matrix[:-1]
        sizes = torch.linalg.svdvals(square)
        null = float(sizes[-1]) <= math.sqrt(system.eps) * float(sizes[0])
        # Without the singular values that are rounding, the residual cannot fall further.
        exhausted = residual > goal and null and (invariant or within)
        if precondition is not None:  # the matrix is that of A M⁻¹
            yield Cycle(_tree.copy(precondition(x)), residual, 0.0, len(columns), exhausted, [])
            return
        ritz = (torch.linalg.eigvalsh((square + square.T) / 2) - self.damping).tolist()
        yield Cycle(x, residual, float(sizes[0]), len(columns), exhausted, ritz)


def _hessenberg(columns: list[list[float]]) -> torch.Tensor:
    """H with A Q_k = Q_{k+1} H, [k + 1, k]."""
    k = len(columns)
    padded = [[*column, *[0.0] * (k + 1 - len(column))] for column in columns]
    return torch.tensor(padded, dtype=torch.float64).reshape(k, k + 1).T


def _least_squares(matrix: torch.Tensor, eps: float) -> tuple[float, torch.Tensor]:
    """The smallest ‖e₁ − H y‖, and a y for it; singular values of H that are rounding are left out.

    Singular values below √ε of the largest are left out too if the residual does not grow: they only make y long.
    """
    first = torch.zeros(len(matrix), dtype=torch.float64)
    first[0] = 1.0
    long, short = (torch.linalg.pinv(matrix, rtol=cut) @ first for cut in (4.0 * eps, math.sqrt(eps)))
    sizes = [float(torch.linalg.vector_norm(first - matrix @ y)) for y in (long, short)]
    return (sizes[1], short) if sizes[1] <= 1.001 * sizes[0] else (sizes[0], long)


class _Rotations:
    """The Givens rotations that make H triangular; they give the smallest ‖e₁ − H y‖ after each column."""

    def __init__(self) -> None:
        self._rotations: list[tuple[float, float]] = []
        self._residual = 1.0

    def add(self, column: list[float]) -> float:
        *above, below = column
        for index, (c, s) in enumerate(self._rotations):
            upper, lower = above[index], above[index + 1]
            above[index], above[index + 1] = c * upper + s * lower, c * lower - s * upper
        size = math.hypot(above[-1], below)
        c, s = (above[-1] / size, below / size) if size > 0.0 else (0.0, 1.0)
        self._rotations.append((c, s))
        self._residual *= abs(s)
        return self._residual
