"""What a solver is, what it returns, and what all of them do before and after their own iteration."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

import torch

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, ArgumentTypeError

Product = Callable[[Tree], Tree]
# Maps a damping δ to r ↦ M⁻¹ r, with M near A + δI.
Inverse = Callable[[float], Product]
# The relative residual to stop at, or a function of the number of solves before that tells it.
Tolerance = float | Callable[[int], float]


class Status(StrEnum):
    """How a solve ended."""

    CONVERGED = "converged"
    STEP_LIMIT = "step limit"
    NEGATIVE_CURVATURE = "negative curvature"
    DIVERGED = "diverged"
    NOT_FINITE = "not finite"

    @property
    def failed(self) -> bool:
        """Whether the answer should not be used without a second look. Reaching a limit is not failing."""
        return self not in (Status.CONVERGED, Status.STEP_LIMIT)


@dataclass(frozen=True)
class Report:
    """What a solve cost, and how far it came.

    Attributes:
        status: how it ended.
        products: every product with A, those of residual checks and scale estimates included.
        steps: iterations of the algorithm itself.
        residual: ‖b − A x‖ / ‖b‖ of the system that was solved (the damped one where there is a
            damping). It is computed from x by a product, or it is the iteration's own where rounding can
            have moved that by a tenth at most; None where it is neither. For `Neumann` and `SOBA` it is
            that of the iterate before the one that is returned.
        warm: whether the solve started from an earlier solution.
        scale: the step α of a Neumann series.
        damping: the δ in (A + δI) x = b.
        curvature: the smallest and the largest curvature that the solve met, without damping: Ritz values
            of A from conjugate gradient; vᵀA v / vᵀv of its vectors v where it is preconditioned, and from a
            Neumann series.
        hypergradient_error: an estimate of ‖h − h*‖ / ‖h*‖, where h* is the hypergradient of the exact
            solve of the system that was solved, the damped one where there is a damping;
            `bestresponse.Implicit` fills it in. None where it is not known.
        damping_effect: an estimate of ‖h* − h₀‖ / ‖h₀‖, where h₀ is that of the exact solve without damping:
            how far the damping moved the answer. `bestresponse.Implicit` fills it in. None where there is no
            damping, or no unique answer without it.
        detail: what happened, in words, where there is something to say.
    """

    status: Status
    products: int
    steps: int
    residual: float | None
    warm: bool = False
    scale: float | None = None
    damping: float | None = None
    curvature: tuple[float, float] | None = None
    hypergradient_error: float | None = None
    damping_effect: float | None = None
    detail: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """What there is to tell beside the status, as pairs of name and value."""
        values: list[tuple[str, str | None]] = [
            ("products", str(self.products)),
            ("relative residual", _short(self.residual)),
            ("estimated error of the hypergradient", _short(self.hypergradient_error)),
            ("scale", _short(self.scale)),
            ("damping", _short(self.damping)),
            ("estimated effect of the damping", _short(self.damping_effect)),
            ("start", "the last solution" if self.warm else None),
            ("curvature", "from {:.2g} to {:.2g}".format(*self.curvature) if self.curvature else None),
            ("note", self.detail or None),
        ]
        return [(name, value) for name, value in values if value is not None]

    def __str__(self) -> str:
        return ", ".join([str(self.status), *(f"{name} {value}" for name, value in self.lines())])


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class Solution:
    """The solution x, the report, and what a later solve of a similar system may start from.

    Attributes:
        residual: b − (A + δI) x where the solver has it, as `Report.residual` has its norm; else None.
    """

    x: Tree
    report: Report
    memory: dict[str, Any] = field(default_factory=dict)
    residual: Tree | None = None


@dataclass
class System:
    """A x = b with ‖b‖ = 1, as a solver's own iteration sees it.

    Attributes:
        A: the product, which counts its calls.
        b: the right-hand side; it is the solver's to overwrite.
        residual: x, δ ↦ b − (A + δI) x, computed anew from what the caller gave, at one product, which may take
            the part x / p and multiply by p.
        target: turns a tolerance relative to the caller's right-hand side into one relative to this
            ``b``, which is the first residual where the solve starts warm.
        offset: the norm of the start, in units of the solution of this system.
        diagonal, inverse, memory: as given to `Solver.solve`.
        dropped: the residual, in units of that of zero, of a start that was dropped; None where there was none.
        eps: the largest relative precision among b's dtypes.
    """

    A: Product
    b: Tree
    residual: Callable[[Tree, float, float], Tree]
    target: float
    diagonal: Tree | None
    memory: Mapping[str, Any]
    inverse: Inverse | None = None
    dropped: float | None = None
    offset: float = 0.0

    @cached_property
    def eps(self) -> float:
        return max(torch.finfo(x.dtype).eps for x in self.b.values())

    def settle(
        self, x: Tree, damping: float, claimed: float, drift: float, floor: float, goal: float
    ) -> tuple[float, Tree | None]:
        """The norm of the residual of x, and the residual itself where it was computed.

        The iteration's own norm ``claimed`` is taken where rounding can have moved it by a tenth at most: by
        ``drift``. Else it is computed, as in `compute`.
        """
        if drift <= 0.1 * claimed:
            return claimed, None
        return self.compute(x, damping, floor, goal)

    def compute(self, x: Tree, damping: float, floor: float, goal: float) -> tuple[float, Tree]:
        """The residual of x at one product, and what is known of its norm.

        Below ``floor``, about ε ‖A + δI‖ ‖x‖, it may be the product's own rounding. Where that is too coarse to tell
        whether the goal is met, a second product, of a third of x, rounds in another way: then the largest of both
        residuals and of their difference is known.
        """
        left = self.residual(x, damping, 1.0)
        size = _tree.norm(left)
        if size < floor <= goal:
            size = floor
        elif size < floor:
            again = self.residual(x, damping, 3.0)
            size = max(size, _tree.norm(again), _tree.norm(_tree.add_(again, left, -1.0)))
        return size, left


class Counted:
    """A product that counts its calls and checks that what comes back fits what went in."""

    def __init__(self, A: Product) -> None:
        self._product = A
        self.products = 0

    def __call__(self, v: Tree) -> Tree:
        self.products += 1
        product = self._product(v)
        if not isinstance(product, dict) or not _tree.same_layout(product, v):
            raise ArgumentError(
                "A(v) must have the names, shapes, dtypes and devices of v; for v with "
                f"{_layout(v)} it returned {_layout(product)}. Return one tensor for each of v's."
            )
        return product


def _layout(tree: object) -> str:
    if not isinstance(tree, dict):
        return f"a {type(tree).__name__}"
    shown = [f"{k}: {list(x.shape)} {x.dtype} on {x.device}" for k, x in list(tree.items())[:4]]
    return "{" + ", ".join(shown) + (", …" if len(tree) > 4 else "") + "}"


class Solver(ABC):
    """An approximate x = A⁻¹ b for a symmetric A.

    A subclass writes `iterate`, which gets a right-hand side of norm one; checks, scaling, counting
    and warm starts are here. Solvers are frozen dataclasses: what one solve leaves to the next goes
    out in `Solution.memory` and comes in as ``memory``.

    Attributes:
        needs_definite: whether a start x with xᵀ(A + δI)x ≤ 0 is one that cannot be right.
        spoiled: the residual, in units of that of zero, above which a start is dropped.
        needs_start: whether it makes only a few steps from an earlier solution.
    """

    needs_definite: ClassVar[bool] = True
    spoiled: ClassVar[float] = 10.0
    needs_start: ClassVar[bool] = False

    @property
    def chooses_damping(self) -> bool:
        """Whether it damps the system as much as it finds necessary."""
        return False

    @property
    def takes_start(self) -> bool:
        """Whether it tends to the solution of the system from an earlier one."""
        return True

    def solve(
        self,
        A: Product,
        b: Tree,
        *,
        start: Tree | None = None,
        memory: Mapping[str, Any] | None = None,
        diagonal: Tree | None = None,
        inverse: Inverse | None = None,
    ) -> Solution:
        """Solve A x = b.

        Args:
            A: maps a dict of tensors v to the product A v, of the same layout.
            b: the right-hand side, a dict of tensors.
            start: a first guess. Its residual costs one product. A guess x that is spoiled is dropped:
                where xᵀ(A + δI)x ≤ 0, or the residual is above ``spoiled`` times that of zero. (One between one
                and ten times is kept: with a batch of its own for each solve, a good guess is the mean of
                earlier solutions, and its residual on one batch is nearly always above that of zero.)
            memory: `Solution.memory` of an earlier solve with this solver.
            diagonal: an estimate of A's diagonal, or of its known part, with entries ≥ 0.
            inverse: maps a damping δ to a preconditioner r ↦ M⁻¹ r, symmetric and positive definite, with M near
                A + δI; a solver that takes none ignores it, as it does a diagonal.

        Returns:
            The solution with its report. A failed solve returns its best iterate and says so.

        Raises:
            ArgumentError: b is not finite, or A(v) does not fit v.
        """
        if callable(getattr(self, "tolerance", None)):
            return self._solve_in_turn(A, b, start, dict(memory or {}), diagonal, inverse)
        size = _tree.norm(b)
        if not math.isfinite(size):
            raise ArgumentError(
                f"the right-hand side must be finite; got NaN or infinity in {_tree.not_finite(b)[:5]}. "
                "Look at the loss that it is the gradient of."
            )
        if size == 0.0:
            return Solution(_tree.zeros_like(b), Report(Status.CONVERGED, 0, 0, 0.0), dict(memory or {}))
        return self.attempt(
            Counted(A), b, size, start, dict(memory or {}), diagonal=diagonal, inverse=inverse
        )

    def _solve_in_turn(
        self,
        A: Product,
        b: Tree,
        start: Tree | None,
        memory: dict[str, Any],
        diagonal: Tree | None,
        inverse: Inverse | None,
    ) -> Solution:
        """`solve` with the tolerance that a function gives for this solve, by how many there were before."""
        number = memory.pop("solves", 0)
        solver: Any = self
        value = solver.tolerance(number)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ArgumentError(
                f"{type(self).__name__}.tolerance, a function of the number of solves before, must return a number "
                f"≥ 0; got {value!r} for {number}."
            )
        now: Solver = replace(solver, tolerance=value)
        solution = now.solve(A, b, start=start, memory=memory, diagonal=diagonal, inverse=inverse)
        return replace(solution, memory={**solution.memory, "solves": number + 1})

    def attempt(
        self,
        A: "Counted",
        b: Tree,
        size: float,
        start: Tree | None,
        memory: dict[str, Any],
        *,
        diagonal: Tree | None,
        inverse: Inverse | None,
    ) -> Solution:
        """Scale, judge the start, iterate, and scale back; ``size`` is ‖b‖."""
        remaining, ratio, dropped = None, 1.0, None
        if start is not None:
            remaining = _tree.add(b, A(start), -1.0)
            if damping := self.shift(memory):
                _tree.add_(remaining, start, -damping)
            ratio = _tree.norm(remaining) / size
            if ratio == 0.0:
                report = Report(Status.CONVERGED, A.products, 0, 0.0, warm=True)
                return Solution(_tree.copy(start), report, memory)
            along = _tree.dot(start, b) - _tree.dot(start, remaining)
            if not (ratio <= self.spoiled and (along > 0.0 or not self.needs_definite)):
                start, remaining, ratio, dropped = None, None, 1.0, ratio
        scale = size * ratio
        offset = 0.0 if start is None else _tree.norm(start) / scale
        unit = _tree.scale(b, 1.0 / scale) if remaining is None else _tree.scale_(remaining, 1.0 / scale)

        def residual(x: Tree, damping: float, part: float = 1.0) -> Tree:
            whole = x if start is None else _tree.add(x, start, 1.0 / scale)
            whole = whole if part == 1.0 else _tree.scale(whole, 1.0 / part)
            left = add_damping(A(whole), whole, damping)
            return _tree.add(_tree.scale(b, 1.0 / scale), left, -part)

        solution = self.iterate(
            System(A, unit, residual, 1.0 / ratio, diagonal, memory, inverse, dropped, offset)
        )
        del unit
        x = _tree.scale_(solution.x, scale)
        if start is not None:
            x = _tree.add_(x, start)
        known = solution.report.residual
        report = replace(
            solution.report,
            products=A.products,
            warm=start is not None,
            residual=None if known is None else known * ratio,
        )
        left = None if solution.residual is None else _tree.scale_(solution.residual, scale)
        if _tree.not_finite(x):  # larger than its dtype holds
            report = replace(report, status=Status.NOT_FINITE, residual=1.0)
            x, left = _tree.zeros_like(x), None
        return Solution(x, report, solution.memory, left)

    def shift(self, memory: Mapping[str, Any]) -> float:
        """The damping δ of the system (A + δI) x = b that `iterate` solves."""
        return 0.0

    @abstractmethod
    def iterate(self, system: System) -> Solution:
        """Solve ``system``, whose right-hand side has norm one, from zero, into a tree of one's own."""

    def opening(self) -> "Solver":
        """The solver for the first solve of a run of warm-started ones, which has nothing to start from."""
        return self


def no_unique_answer(curvature: tuple[float, float], eps: float) -> str:
    """What to say of a curvature without damping that is indefinite or singular, to rounding; else nothing."""
    lowest, highest = curvature
    rounding = 10.0 * eps * max(abs(lowest), abs(highest))
    if lowest > rounding:
        return ""
    if lowest < -rounding:
        return "no unique answer: negative curvature, the weights are at no minimum of the training loss"
    return "no unique answer: the curvature is singular"


def add_damping(product: Tree, v: Tree, damping: float) -> Tree:
    """(A + δI) v from A v. A new tree: what a product returns may be v itself."""
    return _tree.add(product, v, damping) if damping else product


def require(condition: bool, name: str, required: str, got: object) -> None:
    """Raise for a solver's argument out of its range."""
    if not condition:
        raise ArgumentError(f"{name} must be {required}; got {got!r}.")


def require_number(name: str, value: object) -> None:
    """Raise for a solver's argument that is no number: a tensor or a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(
            f"{name} must be a number; got {type(value).__name__} {value!r}. Pass a Python float or int."
        )


def require_tolerance(name: str, value: object) -> None:
    """Raise for a tolerance that is neither a number ≥ 0 nor a function of the number of solves before."""
    if callable(value):
        return
    require_number(name, value)
    require(value >= 0, name, "≥ 0", value)  # type: ignore[operator]


def at_present(tolerance: Tolerance) -> float:
    """The tolerance of this solve: `Solver.solve` has put a number in the place of a function."""
    assert not callable(tolerance)
    return tolerance


def require_integer(name: str, value: object, minimum: int) -> None:
    """Raise for a solver's argument that is no integer ≥ minimum."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an integer ≥ {minimum}; got {value!r}. Pass a Python int.")
    require(value >= minimum, name, f"an integer ≥ {minimum}", value)
