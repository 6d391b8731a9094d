"""Solvers without iterations: the identity as the inverse, the dense inverse, and the inverse of a curvature."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    BestResponseWarning,
    require,
    require_integer,
    require_number,
)
from .base import MakesPreconditioner, Solver, Wants
from .capacity import require_memory
from .preconditioning import given_preconditioner
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
        reuse: how many further solves use the same matrix, at no product; ≥ 0. In `influence`, where all solves have
            one curvature, all use it anyway. It keeps 16 n² bytes, or 24 if some rows are zero.

    Raises:
        ArgumentError: n > limit, or damping < 0.
    """

    damping: float = 0.0
    limit: int = 5_000
    reuse: int = 0

    def __post_init__(self) -> None:
        require_integer("Exact.reuse", self.reuse, 0)
        require_number("Exact.damping", self.damping)
        require(0 <= self.damping < math.inf, "Exact.damping", "≥ 0 and finite", self.damping)
        require_integer("Exact.limit", self.limit, 1)

    @property
    def savings(self) -> str:
        return "ConjugateGradient, which needs no matrix"

    def shift(self, memory: object) -> float:
        return self.damping

    def iterate(self, system: System) -> Solution:
        flat_b = _tree.flatten(system.b)
        kept, made = self._kept(system, flat_b), 0
        if kept is None:
            kept, made = self._dense(system, flat_b), len(flat_b)
            if kept is None:
                zero = _tree.zeros_like(system.b)
                return Solution(zero, Report(Status.NOT_FINITE, products=made, steps=0, residual=1.0))
        b = flat_b.double()
        # A weight with a zero row, a zero column and a zero entry of b is not part of the system.
        part = kept["inside"] | (b != 0)
        if "part" not in kept or not torch.equal(part, kept["part"]):
            inner = kept["matrix"] if bool(part.all()) else kept["matrix"][part][:, part]
            values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
            kept = {**kept, "part": part, "inner": inner, "values": values, "vectors": vectors}
            kept["columns"] = torch.linalg.vector_norm(inner, dim=0)
        x, report = self._solved(kept, b, flat_b.dtype, system.eps, first=made > 0)
        again = self.reuse if made else kept["again"] - 1
        memory = dict(system.memory) | ({"dense": kept | {"again": again}} if self.reuse else {})
        return Solution(_tree.unflatten(x, system.b), replace(report, products=made), memory)

    def _kept(self, system: System, b: Tensor) -> dict[str, Any] | None:
        """The matrix of an earlier solve, unless it has been used as often as it may be, or no longer fits."""
        kept: dict[str, Any] | None = system.memory.get("dense")
        if kept is None or not kept["again"]:
            return None
        return kept if len(kept["matrix"]) == len(b) and kept["matrix"].device == b.device else None

    def _dense(self, system: System, b: Tensor) -> dict[str, Any] | None:
        """The matrix, and which of its rows or columns are not zero; None if it is not finite."""
        n = len(b)
        if n > self.limit:
            raise ArgumentError(
                f"Exact needs at most limit={self.limit:,} weights; got {n:,}, whose dense curvature takes "
                f"{8 * n * n / 2**30:.1f} GiB and {n:,} products. Use ConjugateGradient, or raise the limit."
            )
        # The columns, the matrix of them, and its symmetric part with eigenvectors.
        needed = {b.device: 4 * 8 * n * n}
        require_memory(f"Exact with {n:,} weights", needed, "Use ConjugateGradient, which needs no matrix.")
        if not bool(torch.isfinite(matrix := dense(system.A, system.b)).all()):
            return None
        # A weight whose gradient no other weight changes (the row of a padding index) must not change others either.
        apart = ~(matrix - torch.diag(matrix.diag())).any(dim=1)
        matrix[:, apart] = torch.diag(matrix.diag())[:, apart]
        return {"matrix": matrix, "inside": matrix.any(dim=0) | matrix.any(dim=1)}

    def _solved(
        self, kept: dict[str, Any], b: Tensor, dtype: torch.dtype, eps: float, first: bool
    ) -> tuple[Tensor, Report]:
        """The solution in float64 and its report; the ``first`` solution by a matrix warns of its rank."""
        part, values, vectors = kept["part"], kept["values"], kept["vectors"]
        size, damped, b = len(values), values + self.damping, b[part]
        precision = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        used = damped.abs() > 4.0 * precision * size**0.5 * damped.abs().max()
        rank = int(used.sum())
        inverse = torch.where(used, 1.0 / torch.where(used, damped, 1.0), 0.0)
        x = vectors @ (inverse * (vectors.T @ b))
        met = float(values[0]), float(values[-1])
        detail = no_unique_answer(met, precision, self.damping)
        if rank < size:
            detail = f"rank {rank} of {size}: the least-squares solution of smallest norm"
            _warn_of_rank(detail, first)
        x = x.to(dtype).double()  # as it is returned
        residual = float(torch.linalg.vector_norm(b - kept["inner"] @ x - self.damping * x))
        # Rounding of x, and again when x is scaled, gives about this residual.
        residual = max(residual, 0.5 * eps * float(torch.linalg.vector_norm(kept["columns"] * x)))
        status = Status.CONVERGED
        if residual > max(_LEFT, 4.0 * eps):
            status = Status.DIVERGED
        elif rank < size and residual > _SOLVED:
            status = Status.STEPS_USED
        report = Report(status, 0, 1, residual, damping=self.damping or None, curvature=met, detail=detail)
        return torch.zeros_like(part, dtype=x.dtype).masked_scatter_(part, x), report


def _warn_of_rank(detail: str, first: bool) -> None:
    if first:
        warnings.warn(
            f"Exact needs an invertible curvature; got {detail}. Add damping or a regulariser "
            "if you do not want that solution.",
            BestResponseWarning,
            stacklevel=2,
        )


@dataclass(frozen=True, eq=False)
class Inverse(Solver):
    """x = (M + δI)⁻¹ b with the inverse that a curvature M, such as `KFAC`, has of itself, at no product.

    M takes the place of the curvature of the method, which serves for the weights of the system alone. Nothing
    measures how far x is from A⁻¹b: the report has no residual. ``ConjugateGradient(preconditioner=M)`` goes on from
    there to the solution. One inverse serves a whole call, so `influence` has many queries at the cost of its factors.

    Args:
        curvature: M. With ``KFAC(predict, loss, rest, steady=0)`` the inverse is that of the Kronecker factors, with
            the mean of the known diagonal of ``rest`` for each layer.
        damping: δ ≥ 0.

    Raises:
        ArgumentTypeError: ``curvature`` has no inverse of its own.

    Reference: Grosse et al. (2023).
    """

    curvature: MakesPreconditioner
    damping: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.curvature, type) or not isinstance(self.curvature, MakesPreconditioner):
            raise ArgumentTypeError(
                "Inverse.curvature must have an inverse of its own, such as KFAC(predict, loss, rest, steady=0); got "
                f"{self.curvature!r}. For other curvatures use ConjugateGradient."
            )
        require_number("Inverse.damping", self.damping)
        require(0 <= self.damping < math.inf, "Inverse.damping", "≥ 0 and finite", self.damping)

    @property
    def wants(self) -> Wants:
        return Wants(preconditioner=self.curvature)

    def shift(self, memory: object) -> float:
        return self.damping

    def iterate(self, system: System) -> Solution:
        inverse = given_preconditioner(self.curvature, system, self.damping)
        assert inverse is not None
        assert system.preconditioner is not None
        x, detail = inverse(system.b), system.preconditioner.detail
        status = Status.NOT_FINITE if _tree.not_finite(x) else Status.STEPS_USED
        return Solution(x, Report(status, 0, 0, None, damping=self.damping or None, detail=detail))


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
