"""Where a problem over several copies of the weights differs from a problem over one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .solvers import Solver
from .solvers.blockwise import Blockwise

if TYPE_CHECKING:
    from .problem import Problem

Part = tuple["Problem", Any, Any, int | None]


class Undivided:
    """The answers of a problem over one copy of the weights; `cross_validation.Folds` has others."""

    # Whether `Implicit()` keeps the Hessian, so that copies of the weights have one answer, batched or in turn.
    keeps_curvature = False

    @property
    def singles(self) -> "Sequence[Problem]":
        """The problems with one copy of the weights: this problem alone, or one for each fold."""
        return (self,)  # type: ignore[return-value]

    @property
    def whole(self) -> "Problem":
        """The problem whose model is trained on all data under the tuned hyperparameters."""
        return self  # type: ignore[return-value]

    def parts(self, method: Any, train_batch: Any, val_batch: Any, seed: int | None) -> Sequence[Part]:
        """Problems whose hypergradients add up to that of this problem, each with its batches and its seed.

        It is empty if ``method`` can run on the problem itself.
        """
        return ()

    def system_solver(self, solver: Solver) -> Solver | Blockwise:
        """The solver of the problem's linear systems, made from that of the method."""
        return solver
