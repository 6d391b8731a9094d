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
class _WhereFollowed(GaussNewton):
    """`GaussNewton()`, and the Hessian for a batch whose training loss it cannot follow."""

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        try:
            system = super().linearise(passes, batch)
        except EvaluationError as error:
            why = str(error)
        else:
            system.detail = f"Gauss-Newton, since the Hessian had negative curvature; {system.detail}"
            return system
        system = Hessian().linearise(passes, batch)  # outside of the handler, which would keep the graph
        system.detail = f"the Hessian for a batch: {why}"
        return system


@dataclass(frozen=True, eq=False)
class Automatic(Curvature):
    """The Hessian until a solve meets negative curvature; from then on `GaussNewton()`, if it finds loss functions.

    At a minimum of the training loss the Hessian has no negative curvature, and the hypergradient is exact. Elsewhere
    it may have some: then there is no best response, and a solve of several steps follows the noise of its batch.
    Gauss-Newton has none where the loss is convex in the outputs. The solve that meets negative curvature is made
    again with Gauss-Newton, and the report of each later solve says so.

    The choice is a part of a method's state: `Tuner.save` keeps it, and after `Problem.forget` the Hessian comes first
    again. The Hessian stays if `GaussNewton()` cannot follow the training loss, for a batch on which the loss calls no
    loss function of torch, in `Folds`, and in `influence`, whose answers must not depend on earlier calls.
    """

    _hessian: Hessian = field(default_factory=Hessian, init=False, repr=False)
    _gauss_newton: GaussNewton = field(default_factory=_WhereFollowed, init=False, repr=False)

    def now(self, problem: Problem) -> Curvature:
        return self._gauss_newton if problem.state(self).memory.get("gauss_newton") else self._hessian

    def at_minimum(self) -> Curvature:
        return self._hessian

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return self.now(passes.problem).linearise(passes, batch)

    def doubts(self, problem: Problem, report: Report) -> bool:
        decided = problem.keeps_curvature or "gauss_newton" in problem.state(self).memory
        return report.indefinite and not decided

    def gives_way(self, passes: Passes, batch: Any) -> bool:
        problem = passes.problem
        parts = batch.batches if isinstance(batch, Batches) else [batch]
        found = [
            finds_outputs(self._gauss_newton, passes, part) for part in parts
        ]  # as many passes on each rank
        follows = all(problem.group.gather(any(found)))
        problem.remember(self, MethodState(memory={"gauss_newton": follows}))
        return follows
