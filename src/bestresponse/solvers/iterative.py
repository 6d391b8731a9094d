"""Solvers that stop at a tolerance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._tree import Tree
from ..errors import ArgumentError, require, require_integer, require_number
from .base import Solver
from .system import Preconditioner, Product, Solution

# The relative residual to stop at, or a function of the number of solves before this one.
Tolerance = float | Callable[[int], float]


@dataclass(frozen=True, eq=False)
class Iterative(Solver):
    """A solver that stops at a relative residual, or after a number of steps.

    If ``tolerance`` is a function, each solve calls it with the number of earlier solves, which `Solution.memory`
    stores.
    """

    max_steps: int = 20
    tolerance: Tolerance = 1e-6

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_integer(f"{name}.max_steps", self.max_steps, 1)
        if not callable(self.tolerance):
            require_number(f"{name}.tolerance", self.tolerance)
            require(self.tolerance >= 0, f"{name}.tolerance", "≥ 0", self.tolerance)

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
        given: dict[str, Any] = {"start": start, "diagonal": diagonal, "preconditioner": preconditioner}
        if not callable(self.tolerance):
            return super().solve(A, b, memory=memory, **given)
        left = dict(memory or {})
        number = left.pop("solves", 0)
        value = self.tolerance(number)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ArgumentError(
                f"{type(self).__name__}.tolerance, a function of the number of solves before, must return a number "
                f"≥ 0; got {value!r} for {number}."
            )
        solution = replace(self, tolerance=value).solve(A, b, memory=left, **given)
        return replace(solution, memory={**solution.memory, "solves": number + 1})

    @property
    def relative_residual(self) -> float:
        """The tolerance of this solve; `solve` has replaced a function by its number."""
        assert not callable(self.tolerance)
        return self.tolerance
