"""The input and output of a solver: a system, and a solution with its report."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError

Product = Callable[[Tree], Tree]
# The number of products in the first estimate of the largest curvature.
_FIRST_ESTIMATE = 8


class Preconditioner(ABC):
    """M⁻¹ for a symmetric positive definite M near A + δI, at any damping δ.

    Attributes:
        detail: a note for the solve's report; empty for none.
    """

    detail: str = ""

    @abstractmethod
    def at(self, damping: float) -> Product:
        """The map r ↦ M⁻¹ r at this damping."""


class Status(StrEnum):
    """How a solve ended."""

    CONVERGED = "converged"
    STEPS_USED = "steps used"
    NEGATIVE_CURVATURE = "negative curvature"
    DIVERGED = "diverged"
    NOT_FINITE = "not finite"

    @property
    def failed(self) -> bool:
        """Whether the answer needs a second look before use. Reaching a limit is not a failure."""
        return self not in (Status.CONVERGED, Status.STEPS_USED)


@dataclass(frozen=True)
class Report:
    """The cost of a solve, and how far it converged.

    Attributes:
        status: how it ended.
        products: the number of products with A, including residual checks and scale estimates.
        steps: iterations of the algorithm itself.
        residual: ‖b − A x‖ / ‖b‖ of the system that was solved (with its damping). It is computed from x by a
            product, or it is the iteration's own residual if rounding can have moved that by a tenth at most; None
            otherwise. For `Neumann` and `SOBA` it is the residual of the iterate before the returned one.
        warm: whether the solve started from an earlier solution.
        scale: the step α of a Neumann series.
        damping: the δ in (A + δI) x = b.
        curvature: the smallest and the largest curvature that the solve met, without damping: Ritz values
            of A from conjugate gradient; vᵀA v / vᵀv of the solver's vectors v with a preconditioner, and from a
            Neumann series.
        hypergradient_error: an estimate of ‖h − h*‖ / ‖h*‖, where h* is the hypergradient of the exact
            solve of the same system, with its damping; `bestresponse.Implicit` sets it. None if it is not known.
            It is too low if b lies along large curvatures and the answer along small ones.
        damping_effect: an estimate of ‖h* − h₀‖ / ‖h₀‖, where h₀ is the hypergradient of the exact solve without
            damping: how far the damping moved the answer. `bestresponse.Implicit` sets it. It is a low estimate, since
            it sees only the curvatures that the solve has met. None without damping, or with negative curvature.
        detail: a note on what happened, as text; empty if there is none.
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

    @property
    def indefinite(self) -> bool:
        """Whether the solve met negative curvature, without damping, beyond rounding."""
        if self.curvature is None:
            return False
        return is_indefinite(*self.curvature)

    def lines(self) -> list[tuple[str, str]]:
        """The contents of the report besides the status, as pairs of name and value."""
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
    """The solution x, the report, and the memory for a later solve of a similar system.

    Attributes:
        residual: b − (A + δI) x if the solver has it; `Report.residual` has its norm. Else None.
        stretch: ‖A⁻¹b − (A + δI)⁻¹b‖ / ‖(A + δI)⁻¹b‖ on the Krylov space of b if the solver has it; else None.
        combination: the coefficients c in x = Σ c_i v_i, where v_i is the vector of the i-th product with A, from 0;
            None if the solver does not know them.
    """

    x: Tree
    report: Report
    memory: dict[str, Any] = field(default_factory=dict)
    residual: Tree | None = None
    stretch: float | None = None
    combination: Mapping[int, float] | None = None


@dataclass
class System:
    """A x = b with ‖b‖ = 1, as a solver's own iteration sees it.

    Attributes:
        A: the product, which counts its calls.
        b: the right-hand side; the solver may overwrite it.
        residual: x, δ ↦ b − (A + δI) x, computed from the caller's arguments at one product, which may use
            the part x / p and multiply by p.
        target: turns a tolerance relative to the caller's right-hand side into one relative to this
            ``b``, which is the first residual after a warm start.
        offset: the norm of the start, in units of the solution of this system.
        diagonal, preconditioner, memory: as given to `Solver.solve`.
        dropped: the residual, in units of that of zero, of a start that was dropped; None if no start was dropped.
        eps: the largest relative precision among b's dtypes.
    """

    A: "Counted"
    b: Tree
    residual: Callable[[Tree, float, float], Tree]
    target: float
    diagonal: Tree | None
    memory: Mapping[str, Any]
    preconditioner: Preconditioner | None = None
    dropped: float | None = None
    offset: float = 0.0

    @cached_property
    def eps(self) -> float:
        return max(torch.finfo(x.dtype).eps for x in self.b.values())

    def compute(self, x: Tree, damping: float, floor: float, goal: float) -> tuple[float, Tree]:
        """The residual of x at one product, and a reliable value of its norm.

        Below ``floor``, about ε ‖A + δI‖ ‖x‖, the residual may be rounding of the product. If that is too coarse to
        decide whether the goal is met, a second product, of a third of x, rounds differently. The norm is then the
        largest of both residuals and of their difference.
        """
        left = self.residual(x, damping, 1.0)
        size = _tree.norm(left)
        if size < floor <= goal:
            size = floor
        elif size < floor:
            again = self.residual(x, damping, 3.0)
            size = max(size, _tree.norm(again), _tree.norm(_tree.add_(again, left, -1.0)))
        return size, left

    def largest_curvature(self, refresh: int) -> tuple[float, Tree]:
        """A lower bound of the largest |eigenvalue| on the right-hand side, by power iteration, and its vector.

        It takes eight products if ``memory["vector"]`` has no vector of an earlier estimate; else ``refresh``.
        """
        start, vector = self.b, self.memory.get("vector")
        products = _FIRST_ESTIMATE
        if vector is not None and _tree.same_layout(vector, start):
            start, products = _tree.add(vector, start), refresh
        size = _tree.norm(start)
        top = 0.0
        for _ in range(products):
            if not 0.0 < size < math.inf:
                break
            vector = _tree.scale(start, 1.0 / size)
            start = self.A(vector)
            size = top = _tree.norm(start)
        return top, vector if vector is not None else self.b


class Counted:
    """A product that counts its calls and checks that the output fits the input."""

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


def is_indefinite(lowest: float, highest: float) -> bool:
    """Whether there is negative curvature that is not rounding, even in float32."""
    return lowest < -1e-6 * max(abs(lowest), abs(highest))


def no_unique_answer(curvature: tuple[float, float], eps: float, damping: float) -> str:
    """A note if the curvature without damping is indefinite or singular, to rounding; else an empty text."""
    lowest, highest = curvature
    if lowest > 10.0 * eps * (max(abs(lowest), abs(highest)) + damping):
        return ""
    if is_indefinite(lowest, highest) and lowest < -10.0 * eps * damping:
        return (
            "no unique answer: negative curvature, the weights are not at a minimum of the training loss (at a saddle "
            "that is intended, such as a Lagrangian's, MINRES, GMRES or Exact gives the answer)"
        )
    return "no unique answer: the curvature is singular"


def add_damping(product: Tree, v: Tree, damping: float) -> Tree:
    """(A + δI) v from A v, as a new tree, since a product may return v itself."""
    return _tree.add(product, v, damping) if damping else product
