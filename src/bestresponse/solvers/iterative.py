"""Solvers that stop at a tolerance."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import ArgumentError, require, require_integer, require_number, require_parameters
from .base import Solver

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
        if callable(self.tolerance):
            require_parameters(f"{name}.tolerance", self.tolerance, "solves")
        else:
            require_number(f"{name}.tolerance", self.tolerance)
            require(self.tolerance >= 0, f"{name}.tolerance", "≥ 0", self.tolerance)

    def present(self, number: int) -> Solver:
        if not callable(self.tolerance):
            return self
        value = self.tolerance(number)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ArgumentError(
                f"{type(self).__name__}.tolerance, a function of the number of solves before, must return a number "
                f"≥ 0; got {value!r} for {number}."
            )
        return replace(self, tolerance=value)

    @property
    def relative_residual(self) -> float:
        """The tolerance as a number, for `iterate`: in a solve, `present` has replaced a function by its number.

        Raises:
            ArgumentError: the tolerance is a function.
        """
        if callable(self.tolerance):
            name = type(self).__name__
            raise ArgumentError(
                f"{name}.relative_residual needs a tolerance that is a number; got a function of the number of solves. "
                "Ask the solver of one solve: solver.present(solves).relative_residual."
            )
        return self.tolerance
