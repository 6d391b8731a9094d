"""The state of a run of conjugate gradient besides its directions."""

import math

import torch

from .. import _tree
from .._tree import Tree
from .preconditioning import Pair
from .system import Status, System


class Run:
    """The iterate, its residual (stored in b), the best iterate, and the curvature met so far.

    Args:
        system: the system to solve.
        most: the largest number of steps.
        keeps: whether a step that meets negative curvature ends the solve with the iterate before it, instead of with a
            failure.
    """

    def __init__(self, system: System, most: int, keeps: bool = False) -> None:
        self.x, self.r, self._A = _tree.zeros_like(system.b), system.b, system.A
        # The coefficients of x in the vectors of the products.
        self.combination: dict[int, float] = {}
        self.step, self.most, self._keeps = 0, most, keeps
        # Whether the solve ended at the iterate before negative curvature.
        self.cut = False
        self.residual = self.smallest = 1.0
        # The residual's norm after it was computed from the iterate; None after a step.
        self.known: float | None = 1.0
        self.lowest, self.highest = math.inf, -math.inf
        self.status = Status.STEPS_USED
        self.pairs: list[Pair] = []
        # The factors of the tridiagonal Lanczos matrix: 1/α_j and β_j.
        self.pivots: list[float] = []
        self.ratios: list[float] = []
        self._kept: Tree | None = None
        self._precision = 4.0 * min(torch.finfo(x.dtype).eps for x in system.b.values())
        self._eps = system.eps
        # A bound on the norm of the solution, including the start.
        self._length = system.offset
        # Whether the coefficients are those of the Lanczos process.
        self.lanczos = True
        # Whether rounding has moved the recurrence away from the residual: its directions are no longer conjugate.
        self.at_rounding = False
        # Whether the next direction is the residual itself.
        self.restarts = False
        # Whether the residual has stopped falling because it is at rounding.
        self.exhausted = False
        self._safe: tuple[Tree, float] | None = None
        # The smallest and the largest pᵀ(A + δI)p, relative to the norm of the preconditioner.
        self._least, self._most = math.inf, 0.0

    def drift(self, damping: float) -> float:
        """How far rounding can move the recurrence from the residual (Greenbaum, 1997): ε ‖A + δI‖ ‖x‖."""
        return self._eps * (abs(self.highest) + damping) * self._length

    def answer(self, failed: bool) -> tuple[Tree, float]:
        """The iterate to return, and its residual.

        This is the last iterate, which is the best in the norm of A. After a failed solve it is the iterate with the
        smallest residual. At rounding, where the last one is arbitrary, it is the one with the smallest computed
        residual.
        """
        last = self.residual if self.known is None else self.known
        if self._safe is not None and (failed or self._safe[1] < last):
            return self._safe
        if failed:
            return (self.x if self._kept is None else self._kept), self.smallest
        return self.x, last

    def accepts(self, along: float, square: float, damping: float, rz: float | None) -> bool:
        """Whether the curvature along a direction is positive, beyond rounding.

        With a preconditioner rᵀz replaces pᵀp, since curvatures that lie far apart in A become similar.
        """
        if not math.isfinite(along) or not square > 0.0:
            self.status = Status.NOT_FINITE
            return False
        curvature = along / square
        self.lowest, self.highest = min(self.lowest, curvature), max(self.highest, curvature)
        scaled = (along + damping * square) / (rz or square)
        earlier, self._most = self._least, max(self._most, scaled)
        self._least = min(earlier, scaled)
        rounding = self._precision * self._most
        if earlier <= rounding:
            # A step followed a curvature that turns out to be rounding: its result cannot be trusted.
            self._kept, self.smallest = _tree.zeros_like(self.x), 1.0
        elif scaled > rounding:
            return True
        elif self._keeps and self.step:
            self.cut = True
            return False
        self.status = Status.NEGATIVE_CURVATURE
        return False

    def _tridiagonal(self) -> torch.Tensor | None:
        """A + δI on the Krylov space, in the Lanczos basis, from the coefficients of the iteration."""
        size = len(self.pivots)
        before = [0.0, *(ratio * pivot for ratio, pivot in zip(self.ratios, self.pivots, strict=False))]
        diagonal = [pivot + more for pivot, more in zip(self.pivots, before, strict=False)]
        pairs = zip(self.ratios, self.pivots, strict=False)
        beside = [math.sqrt(max(b, 0.0)) * p for b, p in pairs][: size - 1]
        if not size or not all(map(math.isfinite, [*diagonal, *beside])):
            return None
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
            matrix = matrix + off + off.T
        return matrix

    def ritz_values(self, damping: float) -> tuple[float, float] | None:
        """The smallest and largest eigenvalue of A on the Krylov space."""
        matrix = self._tridiagonal()
        if matrix is None:
            return None
        values = torch.linalg.eigvalsh(matrix)
        return float(values[0]) - damping, float(values[-1]) - damping

    def stretch(self, damping: float) -> float | None:
        """‖T⁻¹e₁ − (T + δI)⁻¹e₁‖ / ‖(T + δI)⁻¹e₁‖ with T = A on the Krylov space, where b is e₁."""
        matrix = self._tridiagonal() if damping else None
        if matrix is None:
            return None
        values, vectors = torch.linalg.eigh(matrix)
        if float(values[0]) - damping <= 0.0:
            return None
        damped = vectors[0] / values
        lengthened = vectors[0] / (values - damping)
        return float(torch.linalg.vector_norm(lengthened - damped) / torch.linalg.vector_norm(damped))

    def check(self, size: float, residual: Tree) -> bool:
        """Use the computed residual, with the known norm ``size``; return whether to continue.

        If rounding has moved the recurrence away from it, the directions start again, as long as the residual
        halves from one such check to the next.
        """
        computed = _tree.norm(residual)
        if not math.isfinite(computed):
            self.status = Status.NOT_FINITE
            return False
        moved = _tree.norm(_tree.add_(self.r, residual, -1.0))
        lost = not moved <= 0.1 * computed
        # The coefficients of the Lanczos process come from the recurrence's own residuals.
        self.lanczos = self.lanczos and moved <= 1e-3 * computed
        self.r, self.residual, self.known = residual, computed, size
        self.restarts = lost
        if not lost:
            return True
        self.at_rounding = True
        falls = self._safe is None or size <= 0.5 * self._safe[1]
        if self._safe is None or size < self._safe[1]:
            self._safe = _tree.copy(self.x), size
        self.exhausted = not falls
        return falls

    def advance(self, p: Tree, step: float, square: float) -> None:
        self.step += 1
        self.known = None
        self.combination[self._A.products - 1] = step
        self._length += abs(step) * math.sqrt(square)
        _tree.add_(self.x, p, step)

    def measure(self, p: Tree, step: float) -> bool:
        """Measure the residual; keep the iterate before this one if it was the best."""
        self.residual = _tree.norm(self.r)
        if self.residual <= self.smallest:
            self.smallest, self._kept = self.residual, None
        elif self._kept is None:
            # The first iterate's predecessor is exactly zero: undoing a huge step would leave rounding instead.
            self._kept = _tree.zeros_like(p) if self.step == 1 else _tree.add(self.x, p, -step)
        if not math.isfinite(self.residual):
            self.status = Status.NOT_FINITE
            return False
        return True
