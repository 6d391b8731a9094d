"""The inverse of a low-rank approximation of the curvature."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from ..errors import require, require_integer, require_number
from .base import Solver
from .capacity import require_memory
from .system import Report, Solution, Status, System, no_unique_answer

_CONVERGED = 1e-6


@dataclass(frozen=True, eq=False)
class Nystrom(Solver):
    """x = (Â + δI)⁻¹ b with the Nyström approximation of A from its products with a few random vectors.

        Â = Y (Ωᵀ Y)⁺ Yᵀ,    Y = A Ω,  Ω: orthonormal [n, rank]

    Its products do not depend on one another. Its accuracy depends on the number of large eigenvalues of A, not on
    their spread: it suits a curvature with a few large eigenvalues and a damping that represents the
    rest. It costs ``rank`` products, one more for the reported residual, and 3 · rank vectors. At full rank it is the
    exact solve. The random vectors are the same in each solve.

    Args:
        rank: the number of products; ≥ 1.
        damping: δ ≥ 0. Zero leaves out what Â does not see, and gives the least-squares solution.
        reuse: how many further solves use the same Â, at one product each, for the residual; ≥ 0. In `influence`,
            where all solves have one curvature, all use it anyway. Along a run the residual shows how far A has moved.

    Reference: Hataya and Yamada (2023); Frangella, Tropp and Udell (2023).
    """

    rank: int = 10
    damping: float = 1e-2
    reuse: int = 0

    def __post_init__(self) -> None:
        require_integer("Nystrom.rank", self.rank, 1)
        require_integer("Nystrom.reuse", self.reuse, 0)
        require_number("Nystrom.damping", self.damping)
        require(0 <= self.damping < math.inf, "Nystrom.damping", "≥ 0 and finite", self.damping)

    @property
    def savings(self) -> str:
        return f"Nystrom with a rank below {self.rank}; ConjugateGradient"

    def shift(self, memory: object) -> float:
        return self.damping

    def iterate(self, system: System) -> Solution:
        b, zero = _tree.flatten(system.b), _tree.zeros_like(system.b)
        kept, made = self._kept(system, b), 0
        if kept is None:
            kept, made = _approximation(system, b, min(self.rank, len(b))), min(self.rank, len(b))
            if kept is None:
                return Solution(zero, Report(Status.NOT_FINITE, made, made, 1.0))
        basis, values, met = kept["basis"], kept["values"], kept["met"]
        inside = basis.T @ b
        seen = _inverse(values + self.damping, torch.finfo(b.dtype).eps * math.sqrt(len(b))) * inside.double()
        flat = torch.zeros_like(b)
        if self.damping and len(values) < len(b):  # what Â does not see has the damping as its curvature
            flat = b.div(self.damping)
            seen = seen - inside.double() / self.damping
        x = _tree.unflatten(flat.addmv_(basis, seen.to(b.dtype)), system.b)
        left = system.residual(x, self.damping, 1.0)
        residual = _tree.norm(left)
        status = Status.CONVERGED if residual <= _CONVERGED * system.target else Status.STEPS_USED
        if not residual <= system.target:
            status, x, residual = Status.DIVERGED, zero, 1.0
        worse = "the approximation is worse than none" if status is Status.DIVERGED else ""
        report = Report(
            status,
            made + 1,
            made,
            residual,
            damping=self.damping or None,
            curvature=met,
            detail="; ".join(filter(None, (worse, no_unique_answer(met, system.eps, self.damping)))),
        )
        again = self.reuse if made else kept["again"] - 1
        memory = dict(system.memory) | ({"nystrom": kept | {"again": again}} if self.reuse else {})
        return Solution(x, report, memory, residual=left if not status.failed else None)

    def _kept(self, system: System, b: Tensor) -> dict[str, Any] | None:
        """The approximation of an earlier solve, unless it has been used as often as it may be, or no longer fits."""
        kept: dict[str, Any] | None = system.memory.get("nystrom")
        if kept is None or not kept["again"]:
            return None
        basis = kept["basis"]
        fits = len(basis) == len(b) and basis.dtype == b.dtype and basis.device == b.device
        return kept if fits else None


def _approximation(system: System, b: Tensor, rank: int) -> dict[str, Any] | None:
    """The eigenvectors and eigenvalues of Â, and the extreme ones of ΩᵀAΩ; None if a product is not finite."""
    # The sketch, the products one by one and together, and the basis.
    needed = {b.device: 4 * len(b) * rank * b.element_size()}
    advice = "Use a lower rank, or ConjugateGradient."
    require_memory(f"Nystrom of rank {rank:,} with {len(b):,} weights", needed, advice)
    sketch = _orthonormal(len(b), rank, b)
    products = [_tree.flatten(system.A(_tree.unflatten(column, system.b))) for column in sketch.T]
    images = torch.stack(products, dim=1)
    if not bool(torch.isfinite(images).all()):
        return None
    core = (sketch.T @ images).double()
    basis, values = _eigen(core, images)
    ritz = torch.linalg.eigvalsh((core + core.T) / 2)
    return {"basis": basis, "values": values, "met": (float(ritz[0]), float(ritz[-1]))}


def _orthonormal(n: int, rank: int, like: Tensor) -> Tensor:
    """The same random orthonormal columns each time, [n, rank]."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(n, rank, generator=generator, dtype=like.dtype)
    q: Tensor = torch.linalg.qr(columns.to(like.device))[0]
    return q


def _eigen(core: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvectors [n, rank] and eigenvalues of Â, in rising order: with Y = QR, those of R (ΩᵀY)⁺ Rᵀ."""
    q, r = torch.linalg.qr(images)
    r = r.double()
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    half = r @ vectors
    eps = torch.finfo(images.dtype).eps
    small = half @ torch.diag(_inverse(values, eps * math.sqrt(len(images)))) @ half.T
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    return q @ vectors.to(q.dtype), values


def _inverse(values: Tensor, precision: float) -> Tensor:
    """1 / values, and zero where they are rounding."""
    kept = values.abs() > 4.0 * precision * values.abs().max()
    return torch.where(kept, 1.0 / torch.where(kept, values, 1.0), 0.0)
