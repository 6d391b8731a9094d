"""The two extremes: the identity as the inverse, and the dense inverse."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, BestResponseWarning, require, require_integer, require_number
from .base import Solver
from .capacity import require_memory
from .system import Product, Report, Solution, Status, System, no_unique_answer

# The relative residual that an answer may have, and that a least-squares solution has if the system has a solution.
_LEFT, _SOLVED = 1e-2, 1e-6


@dataclass(frozen=True, eq=False)
class Identity(Solver):
    """x = b: the identity replaces the inverse curvature, at no product.

    This is the "T1 − T2" method. Its hypergradient has the right sign if A is near a multiple of
    the identity, but not the right size.

    Reference: Luketina, Berglund, Greff and Raiko (2016).
    """

    def iterate(self, system: System) -> Solution:
        return Solution(system.b, Report(Status.STEPS_USED, products=0, steps=0, residual=None))


@dataclass(frozen=True, eq=False)
class Exact(Solver):
    """x = (A + δI)⁻¹ b from the dense A, with one product for each column; for small systems and for tests.

    The matrix is made symmetric and decomposed into eigenvalues in float64. Eigenvalues within rounding
    of zero (4 ε √n of the largest) are left out: a singular system gets the least-squares solution of
    smallest norm, and a warning that names the rank. If its residual is more than a hundredth of the
    right-hand side, since there is no solution or A is not symmetric, the status is *diverged*.

    Args:
        damping: δ ≥ 0.
        limit: the largest number of weights n to accept; n products and 8 n² bytes are needed.

    Raises:
        ArgumentError: n > limit, or damping < 0.
    """

    damping: float = 0.0
    limit: int = 5_000

    def __post_init__(self) -> None:
        require_number("Exact.damping", self.damping)
        require(0 <= self.damping < math.inf, "Exact.damping", "≥ 0 and finite", self.damping)
        require_integer("Exact.limit", self.limit, 1)

    @property
    def savings(self) -> str:
        return "ConjugateGradient, which needs no matrix"

    def shift(self, memory: object) -> float:
        return self.damping

    def iterate(self, system: System) -> Solution:
        n = _tree.size(system.b)
        if n > self.limit:
            raise ArgumentError(
                f"Exact needs at most limit={self.limit:,} weights; got {n:,}, whose dense curvature takes "
                f"{8 * n * n / 2**30:.1f} GiB and {n:,} products. Use ConjugateGradient, or raise the limit."
            )
        flat_b = _tree.flatten(system.b)
        # The columns, the matrix of them, and its symmetric part with eigenvectors.
        needed = {flat_b.device: 4 * 8 * n * n}
        require_memory(f"Exact with {n:,} weights", needed, "Use ConjugateGradient, which needs no matrix.")
        if not bool(torch.isfinite(matrix := dense(system.A, system.b)).all()):
            zero = _tree.zeros_like(system.b)
            return Solution(zero, Report(Status.NOT_FINITE, products=n, steps=0, residual=1.0))
        # A weight whose gradient no other weight changes (the row of a padding index) must not change others either.
        apart = ~(matrix - torch.diag(matrix.diag())).any(dim=1)
        matrix[:, apart] = torch.diag(matrix.diag())[:, apart]
        b = flat_b.double()
        # A weight with a zero row, a zero column and a zero entry of b is not part of the system.
        part = matrix.any(dim=0) | matrix.any(dim=1) | (b != 0)
        matrix, b = matrix[part][:, part], b[part]
        size = len(b)
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        damped = values + self.damping
        precision = min(torch.finfo(flat_b.dtype).eps, torch.finfo(torch.float32).eps)
        kept = damped.abs() > 4.0 * precision * size**0.5 * damped.abs().max()
        rank = int(kept.sum())
        inverse = torch.where(kept, 1.0 / torch.where(kept, damped, 1.0), 0.0)
        x = vectors @ (inverse * (vectors.T @ b))
        met = float(values[0]), float(values[-1])
        detail = no_unique_answer(met, precision, self.damping)
        if rank < size:
            detail = f"rank {rank} of {size}: the least-squares solution of smallest norm"
            warnings.warn(
                f"Exact needs an invertible curvature; got {detail}. Add damping or a regulariser "
                "if you do not want that solution.",
                BestResponseWarning,
                stacklevel=2,
            )
        x = x.to(flat_b.dtype).double()  # as it is returned
        residual = float(torch.linalg.vector_norm(b - matrix @ x - self.damping * x))
        # Rounding of x, and again when x is scaled, gives about this residual.
        residual = max(residual, 0.5 * system.eps * float(torch.linalg.matrix_norm(matrix * x)))
        status = Status.CONVERGED
        if residual > max(_LEFT, 4.0 * system.eps):
            status = Status.DIVERGED
        elif rank < size and residual > _SOLVED:
            status = Status.STEPS_USED
        report = Report(
            status,
            products=n,
            steps=1,
            residual=residual,
            damping=self.damping or None,
            curvature=met,
            detail=detail,
        )
        whole = torch.zeros(n, dtype=x.dtype, device=x.device).masked_scatter_(part, x)
        return Solution(_tree.unflatten(whole, system.b), report)


def dense(A: Product, like: Tree) -> Tensor:
    """The matrix of the products with the unit vectors, [n, n] in float64."""
    n = _tree.size(like)
    flat = _tree.flatten(like)
    columns = []
    for index in range(n):
        unit = torch.zeros_like(flat)
        unit[index] = 1.0
        columns.append(_tree.flatten(A(_tree.unflatten(unit, like))).double())
    return torch.stack(columns, dim=1)
