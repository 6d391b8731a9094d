"""The curvature of `Implicit()`: the Hessian, until a solve shows that it is indefinite."""

from dataclasses import dataclass, field
from typing import Any

from ..batches import Batches
from ..errors import EvaluationError
from ..memory import MethodState
from ..problem import Passes, Problem
from ..solvers import Report
from .at_losses import finds_outputs
from .base import Curvature, Linearisation
from .gauss_newton import GaussNewton
from .hessian import Hessian


@dataclass(frozen=True, eq=False)
class Automatic(Curvature):
    """The Hessian until a solve meets negative curvature; from then on `GaussNewton()`, if it finds loss functions.

    At a minimum of the training loss the Hessian has no negative curvature, and the hypergradient is exact. Elsewhere
    it may have some: then there is no best response, and a solve of several steps follows the noise of its batch.
    Gauss-Newton has none where the loss is convex in the outputs. The solve that meets negative curvature is made
    again with Gauss-Newton, and the report of each later solve says so.

    The choice is a part of a method's state: `Tuner.save` keeps it, and after `Problem.forget` the Hessian comes first
    again. The Hessian stays if `GaussNewton()` cannot follow the training loss, for a batch on which the loss calls no
    loss function of torch, and in `Folds` that run batched.
    """

    _hessian: Hessian = field(default_factory=Hessian, init=False, repr=False)
    _gauss_newton: GaussNewton = field(default_factory=GaussNewton, init=False, repr=False)

    def now(self, problem: Problem) -> Curvature:
        return self._gauss_newton if problem.state(self).memory.get("gauss_newton") else self._hessian

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        if self.now(passes.problem) is self._hessian:
            return self._hessian.linearise(passes, batch)
        try:
            system = self._gauss_newton.linearise(passes, batch)
        except EvaluationError as error:  # nothing to follow in this batch; any other error comes again
            system = self._hessian.linearise(passes, batch)
            system.detail = f"the Hessian of this batch: {error}"
            return system
        system.detail = f"Gauss-Newton, since the Hessian had negative curvature; {system.detail}"
        return system

    def gives_way(self, passes: Passes, batch: Any, report: Report) -> bool:
        problem = passes.problem
        if not report.indefinite or len(problem.singles) > 1 or "gauss_newton" in problem.state(self).memory:
            return False
        first = batch.batches[0] if isinstance(batch, Batches) else batch
        follows = all(problem.group.gather(finds_outputs(self._gauss_newton, passes, first)))
        problem.remember(self, MethodState(memory={"gauss_newton": follows}))
        return follows
