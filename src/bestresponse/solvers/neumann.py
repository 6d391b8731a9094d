"""The truncated Neumann series: Algorithm 3 of the paper."""

import math
from dataclasses import dataclass, replace
from typing import Any

from .. import _tree
from .._tree import Tree
from ..errors import require_flag, require_integer, require_positive
from .base import Solver, Wants
from .system import Report, Solution, Status, System

# Terms of a convergent series never grow in norm. Terms of a series that diverges slowly (for example with a small
# negative eigenvalue) may grow a little within a few terms and still be useful.
_GROWTH = 2.0
_REFRESH = 2
_LOWERINGS = 20
# The largest relative residual of a series whose terms have vanished.
_LEFT = 1e-2


@dataclass(frozen=True, eq=False)
class Neumann(Solver):
    """x_i = α Σ_{j=0..i} (I − αA)ʲ b, with i = ``terms`` products: Algorithm 3 of the paper.

    It converges to A⁻¹b if every eigenvalue of A lies in (0, 2/α); otherwise it diverges. The factor α
    is part of the answer (the paper's listing leaves it out). ``terms=0`` is α b.

    The solver watches the size of the terms. A term of more than twice the smallest one's norm ends the series
    as *diverged*, or as *negative curvature* if that is the reason, and the best iterate is returned. If the solver
    chose the scale, it first halves it, or lowers it to the value that the growing term implies, and starts the
    series again.

    Args:
        terms: i, the number of products; ≥ 0.
        scale: α > 0, the step of the gradient descent that the series stands for. None takes
            1 / λ_max, estimated with eight power-iteration products at first and two in each later
            call, from the last estimate's vector and the new right-hand side.
        fresh_batches: whether each product takes the next batch of the training `Batches` instead of
            their mean, as LiSSA does: x is then an estimate of A⁻¹b, whose mean over the batches' draw is
            that of the series. The mixed term is that of all batches.

    Raises:
        ArgumentError: terms < 0 or scale ≤ 0.

    Reference: Lorraine, Vicol and Duvenaud (2019), Theorem 2 and Algorithm 3; for ``fresh_batches``,
    Agarwal, Bullins and Hazan (2017).
    """

    terms: int = 20
    scale: float | None = None
    fresh_batches: bool = False

    def __post_init__(self) -> None:
        require_integer("Neumann.terms", self.terms, 0)
        require_flag("Neumann.fresh_batches", self.fresh_batches)
        require_positive("Neumann.scale", self.scale)

    @property
    def wants(self) -> Wants:
        return Wants(fresh_batches=self.fresh_batches, start="refused" if self.fresh_batches else "optional")

    def iterate(self, system: System) -> Solution:
        if self.scale is not None:
            return self._series(system, float(self.scale), {})
        top, vector = system.largest_curvature(_REFRESH)
        if not math.isfinite(top):
            report = Report(Status.NOT_FINITE, 0, 0, 1.0)
            return Solution(_tree.scale_(system.b, 0.0), report, {})
        memory: dict[str, Any] = {"vector": vector, "top": top}
        scale = 1.0 / top if top > 0.0 else 1.0
        solution = self._series(system, scale, memory)
        lowered = 0
        while solution.report.status is Status.DIVERGED and lowered < _LOWERINGS:
            lowered += 1
            assert solution.report.curvature is not None
            scale = min(scale / 2.0, 1.0 / solution.report.curvature[1])
            solution = self._series(system, scale, memory)
        if lowered:
            detail = f"the scale was lowered {lowered} times, to {scale:.3g}, since the series grew"
            solution = Solution(solution.x, replace(solution.report, detail=detail), memory)
        return solution

    def _series(self, system: System, scale: float, memory: dict[str, Any]) -> Solution:
        """The sum of the terms pʲ = (I − αA)ʲ b; the residual of the sum up to j − 1 is pʲ itself."""
        term = system.b
        total = _tree.copy(term)
        # Terms of this size are lost in the sum, and their squares may underflow.
        precision = system.eps**2
        smallest = size = length = 1.0
        best: Tree | None = None
        lowest, highest = math.inf, -math.inf
        status = Status.STEPS_USED
        steps = 0
        while steps < self.terms and status is Status.STEPS_USED:
            steps += 1
            product = system.A(term)
            curvature = _tree.dot(term, product) / size / size
            following = _tree.add(term, product, -scale)
            del product  # which would be held during the next one
            size = _tree.norm(following)
            if not math.isfinite(size) or not math.isfinite(curvature):
                status = Status.NOT_FINITE
                continue
            lowest, highest = min(lowest, curvature), max(highest, curvature)
            if size <= smallest:
                smallest, best = size, None
            elif best is None:
                # The smallest residual is that of the sum without the term that grew.
                best = _tree.add(total, term, -1.0)
            if size > _GROWTH * smallest:
                negative = curvature <= 0.0
                status = Status.NEGATIVE_CURVATURE if negative else Status.DIVERGED
                continue
            term = following
            length += size
            _tree.add_(total, term)
            if size < precision:
                status = Status.CONVERGED
        if status.failed:
            size, total = smallest, best if best is not None else _tree.add(total, term, -1.0)
        x = _tree.scale_(total, scale)
        # The residual of the sum without its last term, from above where the series converges.
        residual: float | None = size
        left: Tree | None = term
        if self.fresh_batches or not self.terms:
            residual = left = None
        elif size <= 10.0 * system.eps * length:
            # The terms are rounding compared with their sum.
            floor = system.eps * max(abs(lowest), abs(highest)) * _tree.norm(x)
            residual, left = system.compute(x, 0.0, floor, _LEFT)
            if status is Status.CONVERGED and residual > _LEFT:
                status = Status.STEPS_USED
        report = Report(
            status,
            products=steps,
            steps=steps,
            residual=residual,
            scale=scale,
            curvature=(lowest, highest) if lowest <= highest else None,
        )
        return Solution(x, report, memory, None if status.failed else left)
