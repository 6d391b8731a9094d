"""What a solver wants beside products."""

from collections.abc import Collection
from typing import Any

from ..problem import Passes
from ..solvers import Wants


def supplies(wants: Wants, passes: Passes, batch: Any, names: Collection[str]) -> dict[str, Any]:
    """The diagonal of the curvature that the problem knows, and an inverse at the weights and the batch, if wanted."""
    source = wants.preconditioner
    return {
        "diagonal": passes.problem.curvature_diagonal(names) if wants.diagonal else None,
        "preconditioner": None if source is None else source.make_preconditioner(passes, batch),
    }
