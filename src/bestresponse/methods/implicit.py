"""The hypergradient: Algorithm 2 of the paper."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .._tree import Tree
from ..curvatures import Automatic, Curvature, Hessian
from ..curvatures.base import Linearisation, require_curvature
from ..curvatures.by_products import ByProducts
from ..curvatures.several_batches import linear_system
from ..errors import ArgumentError, ArgumentTypeError
from ..memory import MethodState
from ..passes.forms import paused
from ..passes.running_statistics import Reading
from ..problem import Passes
from ..solvers import ConjugateGradient, Identity, Report, Solution, Solver, Status
from ..verification.base import Claim
from ..verification.claims import SecondDerivatives
from .base import CurvatureMethod, combine
from .estimates import damping_effect, damping_stretch, missing_part
from .hypergradient import Hypergradient
from .reach import refuse_unreached
from .sharding import needing_whole
from .singular import singular_operation
from .supplies import supplies
from .validation import validation_gradient

# The error of a warm-started hypergradient is estimated once in so many calls.
_CALLS = 10


@dataclass(frozen=True, eq=False)
class Implicit(CurvatureMethod):
    """The implicit function theorem: Algorithm 2 of the paper, with any solver and any curvature.

        v₁ = ∂L_V/∂w,   v₂ = A⁻¹ v₁,   dL_V/dλ = ∂L_V/∂λ − v₂ · ∂²L_T/∂w∂λ

    It is exact where w is a stationary point of the training loss and the solve is exact.

    Args:
        solver: how to invert A; None is the recommended solver: conjugate gradient of at most four steps a
            call, warm-started, with automatic damping and fewer steps where batches are noisy.
        curvature: which A to use; None is the Hessian if a solver was given, else `curvatures.Automatic`: the Hessian
            until a solve meets negative curvature, and from then on Gauss-Newton if it can follow the training loss.
        warm_start: whether a call starts from the last solution of the same method object; None means
            True exactly when no solver was given. The first solve of a warm-started conjugate
            gradient continues after its own steps, up to 20, while the relative residual is above 0.1, below 1,
            and falls.
        estimate_error: whether to estimate the error that the solve leaves in the hypergradient
            (`Report.hypergradient_error`), at the cost of one more mixed product; of warm-started calls, the first
            and every tenth after it.

    Raises:
        ArgumentTypeError: ``solver`` is not a solver, or ``curvature`` not a curvature.
    """

    solver: Solver | None = None
    curvature: Curvature = None  # type: ignore[assignment]  # __post_init__ sets it
    warm_start: bool | None = None
    estimate_error: bool = True

    def __post_init__(self) -> None:
        if self.warm_start is None:
            object.__setattr__(self, "warm_start", self.solver is None)
        if self.curvature is None:
            object.__setattr__(self, "curvature", Hessian() if self.solver is not None else Automatic())
        if not isinstance(self.warm_start, bool):
            raise ArgumentTypeError(
                f"Implicit.warm_start must be True, False or None; got {self.warm_start!r}."
            )
        if self.solver is None:
            object.__setattr__(self, "solver", ConjugateGradient(max_steps=4, damping=None))
        if not isinstance(self.solver, Solver):
            raise ArgumentTypeError(
                f"Implicit.solver must be a solver, such as Neumann(terms=20); got {self.solver!r}."
            )
        require_curvature("Implicit", self.curvature)
        if self.warm_start and self.solver.wants.start == "refused":
            raise ArgumentError(
                f"{self.solver!r} estimates the solution from zero, and from a warm start would tend to "
                "the solution of its first batch; got warm_start=True. Use solvers.SOBA(fresh_batches=True)."
            )

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem, read = passes.problem, Reading(passes, train_batch)
        calls = problem.state(self).memory.get("calls", 0) if self.warm_start else 0
        val_loss, val_gradient, direct = validation_gradient(passes, val_batch, read)
        with paused() as resumed:
            system, b, products, solution = self._solved(passes, train_batch, val_gradient, direct, resumed)
            del val_gradient
            estimates = self.estimate_error and calls % _CALLS == 0
            missing = missing_part(resumed(system.mixed), solution, b) if estimates else None
            stretch = damping_stretch(solution, b)
            del b
            mixed = products.of(solution) or resumed(system.mixed)(solution.x)
            if system.reached.isdisjoint(map(id, problem.hyperparameters.values())):
                problem.warn_once(
                    "no mixed term",
                    "no hyperparameter reaches train_loss, so the hypergradient is the direct part alone, which "
                    "Direct() gives without a solve. If hyperparameters act on the training, put them into train_loss.",
                )
            indirect = {n: None if x is None else -x for n, x in mixed.items()}
            result = combine(problem, val_loss, direct, indirect)
            size = problem.group.largest(result.norm)
        singular = ""
        if self.twice and (solution.report.status is Status.NOT_FINITE or not math.isfinite(size)):
            _, again, _ = validation_gradient(passes, val_batch, Reading(passes, train_batch))
            singular = singular_operation(passes, train_batch, system.covered(again))
        report = replace(
            solution.report,
            status=self._status(solution.report),
            hypergradient_error=missing / size if missing is not None and size > 0.0 else None,
            damping_effect=damping_effect(result, stretch),
            detail="; ".join(filter(None, (singular, solution.report.detail, system.detail, read.detail))),
        )
        if math.isfinite(size):
            kept, more = (solution.x, {"calls": calls + 1}) if self.warm_start else (None, {})
            problem.remember(self, MethodState(kept, {**solution.memory, **more}))
        return replace(result, solve=report, norms=read.norms)

    def _status(self, report: Report) -> Status:
        """Keep *converged* only for the requested system, not for one that the solver had to damp."""
        assert self.solver is not None
        if report.status is Status.CONVERGED and self.solver.chooses_damping and report.indefinite:
            return Status.NEGATIVE_CURVATURE
        return report.status

    @property
    def savings(self) -> str:
        return self.solver.savings if self.solver is not None else ""

    def needing_whole(self) -> object:
        return needing_whole(self.solver, self.curvature)

    def claim(self) -> Claim:
        return SecondDerivatives(self.curvature, product=not isinstance(self.solver, Identity))

    def _solved(
        self,
        passes: Passes,
        batch: Any,
        gradient: Tree,
        direct: Mapping[str, Tensor | None],
        resumed: Callable[..., Any],
    ) -> tuple[Linearisation, Tree, ByProducts, Solution]:
        """The linear system and its solution; made again if the curvature gives way to another one."""
        spent = 0
        if self.warm_start:
            passes.problem.meet(self)
        while True:
            system: Linearisation = resumed(linear_system)(self.curvature, passes, batch)
            refuse_unreached(passes.problem, direct, system.reached)
            b = system.responding(system.covered(gradient))
            products = ByProducts(system)
            solution = self._solve(passes, batch, products, b, resumed)
            spent += solution.report.products
            if self.curvature.doubts(passes.problem, solution.report):
                del system, products.system  # the memory of the graph, before another loss is run
                if resumed(self.curvature.gives_way)(passes, batch):
                    passes.problem.remember(self, MethodState())
                    continue
                products.system = system = resumed(linear_system)(self.curvature, passes, batch)
            return system, b, products, replace(solution, report=replace(solution.report, products=spent))

    def _solve(
        self, passes: Passes, batch: Any, products: ByProducts, b: Tree, resumed: Callable[..., Any]
    ) -> Solution:
        assert self.solver is not None
        problem, system = passes.problem, products.system
        state = problem.state(self)
        if not self.warm_start and self.solver.wants.start == "required":
            problem.warn_once(
                "cold steps",
                f"{type(self.solver).__name__} makes a few steps a call from the last solution, which needs "
                "warm_start=True; without it each call starts from zero.",
            )
        start = state.solution if state.solution is not None and state.solution.keys() == b.keys() else None
        start = None if start is None else system.responding(start)
        solver = self.solver.opening() if self.warm_start and start is None else self.solver
        wants = solver.wants
        supplied = resumed(supplies)(wants, passes, batch, system.names)
        # A run of steps continues with the batch after the last one.
        fresh = system.in_turn(state.memory.get("count", 0)) if wants.fresh_batches else None
        solution = problem.system_solver(solver).solve(
            resumed(fresh or products),
            b,
            start=start,
            memory=state.memory,
            **supplied,
        )
        if (preconditioner := supplied["preconditioner"]) is None:
            return solution
        detail = "; ".join(filter(None, (solution.report.detail, preconditioner.detail)))
        return replace(solution, report=replace(solution.report, detail=detail))
