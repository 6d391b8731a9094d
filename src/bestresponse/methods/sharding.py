"""Which methods run on weights that are sharded over the ranks of a group."""

from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from ..batches import Batches
from ..curvatures import Automatic, Curvature, FiniteDifference, GaussNewton, Hessian
from ..errors import EvaluationError
from ..hyperparameters.orthant import fitting
from ..problem import Problem
from ..solvers import MINRES, ConjugateGradient, Identity, Neumann, Solver

_SOLVERS = (ConjugateGradient, MINRES, Neumann, Identity)
_CURVATURES = (Automatic, Hessian, GaussNewton, FiniteDifference)


def needing_whole(solver: Solver | None, curvature: Curvature) -> object:
    """The solver or curvature, if it needs whole weights; else None."""
    wants = None if solver is None else solver.wants
    if wants is not None and (
        type(solver) not in _SOLVERS or wants.preconditioner is not None or wants.diagonal
    ):
        return solver
    if isinstance(solver, ConjugateGradient) and (solver.recycle or solver.preconditioner is not None):
        return solver
    return None if type(curvature) in _CURVATURES else curvature


def refuse_sharded(problem: Problem, part: object, *batches: Any) -> None:
    """Raise if the weights are sharded and a part of a method needs them whole, or a module or batches do."""
    if not problem.group.sharded:
        return
    if part is not None:
        raise EvaluationError(
            f"{part!r} needs whole weights on each rank; got sharded ones (fully_shard). Use Implicit with "
            "ConjugateGradient, MINRES, Neumann or Identity, without recycle and preconditioner, and Hessian, "
            "GaussNewton or FiniteDifference; or SAMA, Penalty or Direct."
        )
    sizes = [batch.total for batch in batches if isinstance(batch, Batches)]
    problem.group.require_same(
        sizes, "sum of the weights of Batches, since with fully_shard they count equally"
    )
    modules = [*problem.model.modules(), *problem.hyper.modules()]
    norms = (m for m in modules if isinstance(m, _NormBase) and m.track_running_stats and m.training)
    unfit = [type(m).__name__ for m in norms]
    fit, others = fitting(problem.hyper, problem.model)
    unfit += [type(m).__name__ for m in (*fit, *others)]
    if unfit:
        raise EvaluationError(
            f"sharded weights (fully_shard) need losses without running statistics and kinks at zero; got {unfit[:5]}. "
            "Use GroupNorm, LayerNorm, or norms in eval mode; and smooth penalties; or DistributedDataParallel."
        )
