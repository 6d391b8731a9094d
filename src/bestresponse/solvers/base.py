"""The base class of solvers, and the work that all of them share before and after their own iteration."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError
from .system import Counted, Preconditioner, Product, Report, Solution, Status, System, add_damping


@runtime_checkable
class MakesPreconditioner(Protocol):
    """A curvature with an inverse, such as `KFAC`, from which `Implicit` makes the preconditioner for each solve."""

    def make_preconditioner(self, passes: Any, batch: Any) -> Preconditioner:
        """The preconditioner at the present weights, from a training batch."""
        ...


@dataclass(frozen=True)
class Wants:
    """What a solver needs besides products and a right-hand side; `Implicit` provides it.

    Attributes:
        diagonal: the known part of A's diagonal, as ``diagonal`` of `Solver.solve`.
        preconditioner: the curvature whose inverse it takes as ``preconditioner``.
        fresh_batches: each product with the next of several training batches, instead of their mean.
        start: an earlier solution: "optional"; "required", since the solver makes only a few steps from it; or
            "refused", since it estimates the solution from zero and would tend to the solution of the first batch.
    """

    diagonal: bool = False
    preconditioner: MakesPreconditioner | None = None
    fresh_batches: bool = False
    start: Literal["optional", "required", "refused"] = "optional"


class Solver(ABC):
    """An approximate x = A⁻¹ b for a symmetric A.

    A subclass writes `iterate`, which gets a right-hand side of norm one. This class does checks, scaling, counting
    and warm starts. Solvers are frozen dataclasses: the state for the next solve is returned in
    `Solution.memory` and passed in as ``memory``.

    Attributes:
        needs_definite: whether a start x with xᵀ(A + δI)x ≤ 0 must be wrong.
        spoiled: the residual, in units of that of zero, above which a start is dropped.
    """

    needs_definite: ClassVar[bool] = True
    spoiled: ClassVar[float] = 10.0

    @property
    def wants(self) -> Wants:
        """What the solver needs besides products and a right-hand side."""
        return Wants()

    @property
    def savings(self) -> str:
        """What needs less memory than this solver, for the message when memory runs out."""
        return ""

    @property
    def chooses_damping(self) -> bool:
        """Whether the solver chooses the damping."""
        return False

    def solve(
        self,
        A: Product,
        b: Tree,
        *,
        start: Tree | None = None,
        memory: Mapping[str, Any] | None = None,
        diagonal: Tree | None = None,
        preconditioner: Preconditioner | None = None,
    ) -> Solution:
        """Solve A x = b.

        Args:
            A: maps a dict of tensors v to the product A v, of the same layout.
            b: the right-hand side, a dict of tensors.
            start: a first guess. Its residual costs one product. A guess x is dropped
                if xᵀ(A + δI)x ≤ 0, or if the residual is above ``spoiled`` times that of zero. (A residual between
                one and ten times that of zero is kept: if each solve has its own batch, a good guess is the mean of
                earlier solutions, and its residual on one batch is nearly always above that of zero.)
            memory: `Solution.memory` of an earlier solve with this solver.
            diagonal: an estimate of A's diagonal, or of its known part, with entries ≥ 0.
            preconditioner: M⁻¹ for an M near A + δI. Solvers that do not use it, or the diagonal, ignore it.

        Returns:
            The solution with its report. A failed solve returns its best iterate, and its status shows the failure.

        Raises:
            ArgumentError: b is not finite, or A(v) does not fit v.
        """
        memory = dict(memory or {})
        now = self.present(memory.get("solves", 0))
        if now is not self:
            number = memory.pop("solves", 0)
            solution = now.solve(
                A, b, start=start, memory=memory, diagonal=diagonal, preconditioner=preconditioner
            )
            return replace(solution, memory={**solution.memory, "solves": number + 1})
        size = _tree.norm(b)
        if not math.isfinite(size):
            raise ArgumentError(
                f"the right-hand side must be finite; got NaN or infinity in {_tree.not_finite(b)[:5]}. "
                "Look at the loss whose gradient it is."
            )
        if size == 0.0:
            zero = Report(Status.CONVERGED, 0, 0, 0.0, damping=self.shift(memory) or None)
            return Solution(_tree.zeros_like(b), zero, memory)
        return self.attempt(
            Counted(A), b, size, start, memory, diagonal=diagonal, preconditioner=preconditioner
        )

    def attempt(
        self,
        A: "Counted",
        b: Tree,
        size: float,
        start: Tree | None,
        memory: dict[str, Any],
        *,
        diagonal: Tree | None,
        preconditioner: Preconditioner | None,
    ) -> Solution:
        """Scale, judge the start, iterate, and scale back; ``size`` is ‖b‖."""
        remaining, ratio, dropped, first = None, 1.0, None, A.products
        damping = self.shift(memory) or None
        if start is not None:
            remaining = _tree.add(b, A(start), -1.0)
            if damping is not None:
                _tree.add_(remaining, start, -damping)
            ratio = _tree.norm(remaining) / size
            if ratio == 0.0:
                report = Report(Status.CONVERGED, A.products, 0, 0.0, True, damping=damping)
                return Solution(_tree.copy(start), report, memory, remaining, combination={first: 1.0})
            along = _tree.dot(start, b) - _tree.dot(start, remaining)
            if not (ratio <= self.spoiled and (along > 0.0 or not self.needs_definite)):
                start, remaining, ratio, dropped = None, None, 1.0, ratio
        scale = size * ratio
        offset = 0.0 if start is None else _tree.norm(start) / scale
        unit = _tree.scale(b, 1.0 / scale) if remaining is None else _tree.scale_(remaining, 1.0 / scale)

        def residual(x: Tree, damping: float, part: float) -> Tree:
            whole = x if start is None else _tree.add(x, start, 1.0 / scale)
            whole = whole if part == 1.0 else _tree.scale(whole, 1.0 / part)
            left = add_damping(A(whole), whole, damping)
            return _tree.add(_tree.scale(b, 1.0 / scale), left, -part)

        solution = self.iterate(
            System(A, unit, residual, 1.0 / ratio, diagonal, memory, preconditioner, dropped, offset)
        )
        del unit
        x = _tree.scale_(solution.x, scale)
        own = solution.combination
        combination = None if own is None else {number: c * scale for number, c in own.items()}
        if start is not None:
            x = _tree.add_(x, start)
            combination = None if combination is None else {first: 1.0, **combination}
        known = solution.report.residual
        report = replace(
            solution.report,
            products=A.products,
            warm=start is not None,
            residual=None if known is None else known * ratio,
            damping=solution.report.damping or damping,
        )
        left = None if solution.residual is None else _tree.scale_(solution.residual, scale)
        too_large = bool(_tree.not_finite(x))  # for its dtype
        if too_large:
            report = replace(report, status=Status.NOT_FINITE)
        worse = report.residual is not None and report.residual > 1.0 + 1e-6
        if too_large or (report.status.failed and worse):
            report, x, left, combination = replace(report, residual=1.0), _tree.zeros_like(x), None, None
        stretch = None if start is not None else solution.stretch
        return Solution(x, report, solution.memory, left, stretch, combination)

    def present(self, number: int) -> "Solver":
        """The solver of the solve after this many earlier ones: another one if settings change from solve to solve."""
        return self

    def shift(self, memory: Mapping[str, Any]) -> float:
        """The damping δ of the system (A + δI) x = b that `iterate` solves."""
        return 0.0

    @abstractmethod
    def iterate(self, system: System) -> Solution:
        """Solve ``system``, whose right-hand side has norm one, from zero, into newly allocated tensors."""

    def opening(self) -> "Solver":
        """The solver for the first solve of a warm-started run, which has no start."""
        return self
